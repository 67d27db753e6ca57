"""Figures of many ranks in one text: below one description, and nobody's twice."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from reference.clusters import wait_until

from kvferry.reference.ranks.figures import FiguresWriter, left_figures, own_figures, together
from kvferry.telemetry.metrics import EndpointMetrics

FIRST = """\
# HELP kvferry_rooms_total Rooms
# TYPE kvferry_rooms_total counter
kvferry_rooms_total{endpoint="p/0"} 1.0
# HELP process_cpu Seconds
# TYPE process_cpu gauge
process_cpu 3.0
"""
SECOND = """\
# HELP kvferry_rooms_total Rooms
# TYPE kvferry_rooms_total counter
kvferry_rooms_total{endpoint="p/1",why="a # HELP b"} 2.0
# HELP kvferry_links Links
# TYPE kvferry_links gauge
kvferry_links{endpoint="p/1"} 4.0
"""


def names_in(text: str) -> set[str]:
    return {each.name for each in text_string_to_metric_families(text)}


def test_one_metric_of_many_ranks_has_one_description() -> None:
    text = together(FIRST, [SECOND, SECOND.replace("p/1", "p/2")])
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert list(families) == ["kvferry_rooms", "process_cpu", "kvferry_links"]
    told = [(each.labels["endpoint"], each.value) for each in families["kvferry_rooms"].samples]
    assert told == [("p/0", 1.0), ("p/1", 2.0), ("p/2", 2.0)]
    assert text.count("# TYPE kvferry_rooms_total") == 1


def test_a_worker_of_one_rank_says_what_it_did_before() -> None:
    assert together(FIRST, []) == FIRST


def test_a_rank_tells_nothing_but_what_its_endpoint_counts() -> None:
    """Other figures have no label that says whose they are."""
    EndpointMetrics("figures/0", "shm")
    names = names_in(own_figures().decode())
    assert "kvferry_bytes" in names
    assert all(name.startswith("kvferry_") for name in names)


def test_a_rank_leaves_its_figures_where_they_are_found(tmp_path: Path) -> None:
    assert left_figures(tmp_path, [1, 2]) == []
    rank = FiguresWriter(tmp_path, 1, every_s=1e6)
    wait_until(lambda: left_figures(tmp_path, [1, 2]), "the first figures")
    rank.close()
    (text,) = left_figures(tmp_path, [1, 2])
    assert names_in(text) <= names_in(own_figures().decode())
    assert [file.name for file in tmp_path.iterdir()] == ["figures-1.txt"]


def test_who_has_nowhere_to_leave_them_ends(tmp_path: Path) -> None:
    rank = FiguresWriter(tmp_path / "gone", 1, every_s=1e6)
    rank.close()
    assert not (tmp_path / "gone").exists()
