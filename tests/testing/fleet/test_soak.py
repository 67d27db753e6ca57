"""A short soak; ``make soak`` runs a long one."""

from __future__ import annotations

import pytest

from kvferry.testing.fleet.soak import SoakPlan, soak


@pytest.mark.timeout(120)
def test_a_short_soak_loses_nothing() -> None:
    plan = SoakPlan(rooms=200, at_once=16, kills=2, stops=2, abort_share=0.1, limit_s=60.0)
    report = soak(plan)
    assert report.problems == []
    assert report.leftovers == {}
    assert report.good
    assert report.rooms == 200
    assert (report.kills >= 2, report.stops, report.aborts > 0) == (True, 2, True)
    # Most rooms have nothing to do with what happens to others.
    assert report.done_everywhere > 100
