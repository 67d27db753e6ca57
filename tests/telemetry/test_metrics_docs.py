"""docs/metrics.md lists every metric, rejection reason and log event of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from endpoint.jobs import over
from prometheus_client import CollectorRegistry

from kvferry.config import ProtocolConfig
from kvferry.discovery.http.metrics import DiscoveryMetrics
from kvferry.discovery.http.waiters import Waiters
from kvferry.discovery.registry import InstanceRegistry
from kvferry.endpoint.handles import Handle
from kvferry.http.connections import Connections, RejectReason
from kvferry.http.limits import HttpLimits
from kvferry.ids import Peer
from kvferry.plan.choose import TransferMode
from kvferry.protocol.codec import FrameFault
from kvferry.protocol.events import WriteFate
from kvferry.protocol.outcome import Done
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import BalancePolicy
from kvferry.router.upstream import OpenResponse
from kvferry.router.worker_pool import Worker, WorkerPool, WorkerRole
from kvferry.telemetry.metrics import AGES, LABELS, REJECTED, EndpointMetrics
from kvferry.telemetry.observer import LoopStatus, WaitReason

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text()
SOURCE = ROOT / "src" / "kvferry"
LOGGING = ("endpoint", "telemetry", "discovery", "transports", "http")
LOGS = {"log", "_log", "logger", "_logger", "logging"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def words(cell: str) -> list[str]:
    """Return the words in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def rows(heading: str, num_cells: int) -> Iterator[list[str]]:
    """Yield the rows of the tables below a heading, without their heads."""
    _, found, section = TEXT.partition(f"\n{heading}\n")
    assert found, f"docs/metrics.md has no heading {heading!r}"
    section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == num_cells:
            yield cells


# ---------------------------------------------------------------- metrics


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]


def documented(heading: str) -> set[Metric]:
    return {
        Metric(words(name)[0], kind, tuple(words(labels)))
        for name, kind, labels, _ in rows(heading, 4)
    }


def collected(registry: CollectorRegistry, common: tuple[str, ...] = ()) -> set[Metric]:
    """Return every metric of a registry; each needs a series to show its labels."""
    found = set()
    for family in registry.collect():
        samples = [one for one in family.samples if not one.name.endswith("_created")]
        assert samples, f"make {family.name} count in this test, so that its labels show"
        assert set(common) <= set(samples[0].labels)
        more = tuple(name for name in samples[0].labels if name not in (*common, "le"))
        name = family.name if family.type == "histogram" else samples[0].name
        found.add(Metric(name, family.type, more))
    return found


def test_every_endpoint_metric_has_a_row() -> None:
    registry = CollectorRegistry()
    meter = EndpointMetrics("prefill/0", "shm", "source", registry)
    meter.room_ended(Handle(1), Done())
    for job in (over(TransferMode.RUNS), over(TransferMode.RUNS, WriteFate.FAILED)):
        meter.write(job, 0.0)
    meter.refused("pages")
    meter.status(LoopStatus(0.0, 0, 0, 0, 1, (), {"impatient": 1, "unproven": 1}))
    meter.link_up(Peer("decode", 0), "shm")
    meter.thread_broken("transport_thread")
    meter.thread_stalled("transport_thread", 0.0)
    assert collected(registry, LABELS) == documented("## Endpoints")
    assert all(f"`{label}`" in TEXT for label in LABELS)


def test_every_discovery_metric_has_a_row() -> None:
    metrics = DiscoveryMetrics(InstanceRegistry("epoch"), Waiters())
    metrics.requests.labels("GET /healthz", "200").inc()
    assert collected(metrics.collection) == documented("## The discovery service")


def test_every_router_metric_has_a_row() -> None:
    metrics = RouterMetrics(WorkerPool(BalancePolicy.LEAST_LOADED, 20.0))
    metrics.requests.labels("/healthz", "200").inc()
    metrics.seconds.labels("/healthz").observe(0.1)
    metrics.attempt(
        OpenResponse(Worker("", WorkerRole.DECODE, "", fixed=False), cast("Any", None), b"")
    )
    metrics.prefixes.labels("pull").inc()
    metrics.prompt_tokens.labels("pulled").inc()
    metrics.moves.labels("drain").observe(0.1)
    metrics.text()
    assert collected(metrics.registry) == documented("## The router")


def test_every_http_metric_has_a_row() -> None:
    registry = CollectorRegistry()
    Connections(HttpLimits(), registry)
    assert collected(registry) == documented("## HTTP")


def test_metric_names_follow_prometheus_conventions() -> None:
    """Counters end in ``_total``; units are base units and stand last."""
    headings = re.findall(r"(?m)^## .*$", TEXT)
    metrics = {metric for heading in headings for metric in documented(heading)}
    assert {metric.kind for metric in metrics} == {"counter", "gauge", "histogram"}
    for metric in metrics:
        assert re.fullmatch(r"kvferry(_[a-z]+)+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        stem = metric.name.removesuffix("_total").removesuffix("_per_second")
        parts = stem.split("_")
        assert not {"ms", "us", "milliseconds", "kb", "mb", "mib"} & {*parts}, metric.name
        assert not {"seconds", "bytes"} & {*parts[:-1]}, metric.name


def test_every_label_value_is_listed() -> None:
    served = {words(name)[0]: meaning for name, _, _, meaning in rows("## HTTP", 4)}
    assert set(RejectReason) <= set(words(served["kvferry_http_rejected_total"]))
    cells = {words(name)[0]: meaning for name, _, _, meaning in rows("## Endpoints", 4)}
    assert set(TransferMode) <= set(words(cells["kvferry_writes_total"]))
    assert set(WaitReason) <= set(words(TEXT.partition("of `kvferry_waiting_rooms`:")[2][:800]))
    assert {age for _, age in AGES} <= set(words(cells["kvferry_pinned_pages"]))
    assert set(WriteFate) <= set(words(cells["kvferry_writes_failed_total"]))
    assert f"`silence_s` ({ProtocolConfig().silence_s:g} s by default)" in TEXT


# ---------------------------------------------------------------- rejections


def syntax(*places: str) -> Iterator[ast.Module]:
    """Parse modules, or all modules in folders."""
    for place in (SOURCE / place for place in places):
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            yield ast.parse(path.read_text(), str(path))


def calls(tree: ast.AST, *methods: str) -> Iterator[ast.Call]:
    """Yield calls of methods with those names."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in methods:
            yield node


def strings(node: ast.AST) -> list[str]:
    found = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return [value for value in found if isinstance(value, str)]


def to_observer(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and "observer" in ast.unparse(call.func.value)


def rejections(tree: ast.Module) -> Iterator[str]:
    """Yield the rejection reasons that a module reports to its observer."""
    for call in filter(to_observer, calls(tree, "refused")):
        if isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value)
        elif isinstance(call.args[0], ast.JoinedStr):
            assert strings(call.args[0]) == ["frame-"], ast.unparse(call)
            yield from (f"frame-{fault}" for fault in FrameFault)


def test_every_rejection_reason_has_a_row() -> None:
    counted = {what for tree in syntax("endpoint") for what in rejections(tree)} | {*REJECTED}
    assert len(counted) > 5 + len(REJECTED)
    assert {words(what)[0] for what, _ in rows("## Endpoints", 2)} == counted


# ---------------------------------------------------------------- logs


class Event(NamedTuple):
    logger: str
    name: str
    keys: tuple[str, ...]
    level: str


def logger_of(tree: ast.Module) -> str:
    """Return the name of the module's logger."""
    (name,) = {strings(call)[0] for call in calls(tree, "getLogger") if strings(call)}
    return name


def events(tree: ast.Module) -> Iterator[Event]:
    for call in calls(tree, *LEVELS):
        assert isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) not in LOGS:
            continue
        line = next(arg for arg in call.args if isinstance(arg, ast.Constant))
        name, *pairs = str(line.value).split()
        keys = [re.fullmatch(r"([a-z_]+)=%[a-z.0-9]+", pair) for pair in pairs]
        assert all(keys), f"{line.value!r} is no event with key=value pairs"
        level = {"exception": "error", "log": "warning, then debug"}.get(
            call.func.attr, call.func.attr
        )
        yield Event(logger_of(tree), name, tuple(key[1] for key in keys if key), level)


def test_every_log_event_has_a_row() -> None:
    logged = {event for tree in syntax(*LOGGING) for event in events(tree)}
    assert len(logged) > 15
    written = {
        Event(logger, words(name)[0], tuple(words(keys)), level)
        for logger in {event.logger for event in logged}
        for name, level, keys, _ in rows(f"### `{logger}`", 4)
    }
    assert written == logged
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", event.name) for event in logged)
