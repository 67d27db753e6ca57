"""Repetitions are counted, with time as a value."""

from __future__ import annotations

from kvferry.telemetry.logs.repeats import Hidden, Repeats


def test_a_few_are_shown_and_the_rest_counted() -> None:
    repeats: Repeats[str] = Repeats(burst=2, window_s=10)
    assert [repeats.shows("a", now) for now in (0, 1, 2, 9)] == [True, True, False, False]
    assert repeats.over(9.9) == []
    assert repeats.over(10) == [Hidden("a", 2)]
    assert repeats.over(10) == []
    assert repeats.shows("a", 10)


def test_keys_do_not_hide_each_other() -> None:
    repeats: Repeats[str] = Repeats(burst=1, window_s=10)
    assert [repeats.shows(key, 0) for key in "abab"] == [True, True, False, False]
    assert repeats.rest() == [Hidden("a", 1), Hidden("b", 1)]
    assert repeats.rest() == []


def test_what_was_not_repeated_is_not_told() -> None:
    repeats: Repeats[str] = Repeats(burst=1, window_s=10)
    repeats.shows("a", 0)
    assert repeats.over(20) == []


def test_the_table_is_bounded() -> None:
    repeats: Repeats[int] = Repeats(burst=1, window_s=10, most_keys=3)
    told = []
    for key in range(100):
        told += repeats.over(0)
        repeats.shows(key, 0)
        repeats.shows(key, 0)
    assert told == [Hidden(key, 1) for key in range(96)]
    assert len(repeats.rest()) == 4
