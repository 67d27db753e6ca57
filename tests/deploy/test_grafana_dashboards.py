"""Queries of the Grafana dashboard and the alerts use existing metrics and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from telemetry.test_metrics_docs import Metric, documented

ROOT = Path(__file__).parents[2]
HEADINGS = ("## Endpoints", "## The discovery service", "## The router", "## HTTP")
COMMON = {"## Endpoints": ("endpoint", "transport")}
SUFFIXES = ("_bucket", "_sum", "_count")
# Labels that Prometheus adds to every series.
TARGET = {"job", "instance"}


def known() -> dict[str, set[str]]:
    """Return every series name with its labels, from docs/metrics.md."""
    found: dict[str, set[str]] = {}
    for heading in HEADINGS:
        for metric in documented(heading):
            labels = {*metric.labels, *COMMON.get(heading, ()), *TARGET}
            found |= {name: labels | _le(metric) for name in _names(metric)}
    return found


def _names(metric: Metric) -> list[str]:
    return [metric.name + end for end in SUFFIXES] if metric.kind == "histogram" else [metric.name]


def _le(metric: Metric) -> set[str]:
    return {"le"} if metric.kind == "histogram" else set()


def problems(query: str) -> list[str]:
    """Return the names in a query that do not exist."""
    metrics, found = known(), []
    names = re.findall(r"\bkvferry_\w+", query)
    for name in names:
        if name not in metrics:
            found.append(f"there is no {name}")
    labels = [word for inside in re.findall(r"\{([^}]*)\}", query) for word in _matched(inside)]
    labels += [w for inside in re.findall(r"by \(([^)]*)\)", query) for w in inside.split(", ")]
    allowed = set().union(*(metrics.get(name, set()) for name in names))
    return found + [f"{names} have no label {label}" for label in labels if label not in allowed]


def _matched(inside: str) -> list[str]:
    return re.findall(r"(\w+)(?:=~|!~|!=|=)", inside)


def queries() -> list[str]:
    dashboard: Any = json.loads((ROOT / "deploy/grafana/kvferry.json").read_text())
    panels = [target["expr"] for p in dashboard["panels"] for target in p.get("targets", ())]
    return panels + [rule["expr"] for rule in rules()]


def rules() -> list[dict[str, Any]]:
    alerts: Any = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    return [rule for group in alerts["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("query", queries())
def test_every_query_uses_existing_names(query: str) -> None:
    assert problems(query) == []


def test_wrong_names_are_found() -> None:
    assert problems("kvferry_bytes") == ["there is no kvferry_bytes"]
    assert problems('sum by (lane) (kvferry_bytes_total{road="x"})') != []


def test_every_alert_has_a_summary_and_a_description() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    dashboard: Any = json.loads((ROOT / "deploy/grafana/kvferry.json").read_text())
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not places & mine
        places |= mine
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
