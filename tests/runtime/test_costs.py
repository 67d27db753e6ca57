"""What each link is taken to cost: by transport, and by the host of the peer."""

from __future__ import annotations

from msgspec.structs import replace

from kvferry.ids import Session
from kvferry.plan.choose import PRESETS
from kvferry.runtime.costs import MAX_PLACES, REMEASURE_S, LinkCosts

SHM, NIXL = PRESETS["shm"], PRESETS["nixl-host"]
FAST, SLOW = replace(NIXL, bytes_per_s=9e9), replace(NIXL, bytes_per_s=1e9)
ONE, TWO, THREE = (Session(1, n) for n in (1, 2, 3))


def costs() -> LinkCosts:
    return LinkCosts({"shm": SHM, "nixl": NIXL})


def test_before_it_is_measured_a_link_costs_what_its_transport_is_known_for() -> None:
    made = costs()
    assert made.of(ONE) == SHM
    made.reached(ONE, "nixl", "10.0.0.1")
    made.reached(TWO, "shm", "10.0.0.1")
    assert (made.of(ONE), made.of(TWO), made.latest) == (NIXL, SHM, SHM)


def test_links_to_one_host_cost_the_same_and_to_another_something_else() -> None:
    made = costs()
    for session, host in ((ONE, "near"), (TWO, "far"), (THREE, "near")):
        made.reached(session, "nixl", host)
    made.measured(ONE, FAST)
    assert (made.of(ONE), made.of(TWO), made.of(THREE)) == (FAST, NIXL, FAST)
    made.measured(TWO, SLOW)
    assert (made.of(ONE), made.of(TWO), made.latest) == (FAST, SLOW, SLOW)
    made.forget(TWO)
    made.measured(TWO, FAST)
    assert made.latest == SLOW, "a link that is over was measured"
    made.reached(TWO, "nixl", "far")
    assert made.of(TWO) == SLOW


def test_a_host_is_measured_now_and_then() -> None:
    made = costs()
    for session, host in ((ONE, "near"), (TWO, "far"), (THREE, "near")):
        made.reached(session, "nixl", host)
    assert [made.due(each, 100.0) for each in (ONE, TWO, THREE)] == [True, True, False]
    assert not made.due(ONE, 100.0 + REMEASURE_S - 1)
    assert made.due(THREE, 100.0 + REMEASURE_S)


def test_hosts_that_nobody_is_on_are_forgotten_when_they_are_many() -> None:
    made = costs()
    for number in range(MAX_PLACES + 2):
        session = Session(2, number + 1)
        made.reached(session, "nixl", f"host{number}")
        assert made.due(session, 0.0)
        made.measured(session, FAST)
        made.forget(session)
    made.reached(ONE, "nixl", "host0")
    assert made.of(ONE) == NIXL
    assert made.due(ONE, 1.0)
