"""Exceptions in checks become findings."""

from __future__ import annotations

from collections.abc import Iterable

from cli.doctor.findings import only

from kvferry.cli.doctor import Area, Finding, State, run_check
from kvferry.errors import TransportError

OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM


AREA = Area("area")


def raising(error: Exception) -> Iterable[Finding]:
    yield AREA.ok("first", "fine")
    raise error


def test_an_exception_in_a_check_becomes_a_problem() -> None:
    found = only(run_check(AREA, "name", lambda: raising(RuntimeError("no luck"))))
    assert (found.area, found.name, found.state) == ("area", "name", PROBLEM)
    assert "RuntimeError: no luck" in found.detail


def test_an_error_of_kvferry_is_split_into_detail_and_remedy() -> None:
    error = TransportError("it is broken; mend it")
    assert run_check(AREA, "name", lambda: raising(error)) == [
        Finding("area", "name", PROBLEM, "it is broken", "mend it")
    ]
