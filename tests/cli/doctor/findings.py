"""Checks of findings."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.cli.doctor import Finding, State


def only(checks: Iterable[Finding]) -> Finding:
    """Return the single finding, which has a remedy unless it is ok."""
    (check,) = checks
    assert (check.remedy == "") == (check.state is State.OK)
    return check
