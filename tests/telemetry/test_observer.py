"""Observers: the events of a room, and endpoints without any observer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from endpoint.test_pair_in_process import AT_ONCE, NUM_PAGES, WAIT_S, Means, Pair, pair_by
from msgspec.structs import replace

from kvferry.plan.choose import TransferMode
from kvferry.protocol.messages import RoomMessage
from kvferry.protocol.outcome import Done
from kvferry.telemetry.metrics import EndpointStats
from kvferry.telemetry.observer import EVENTS, Observer, Observers
from kvferry.transports.nixl import NixlTransport

UNOBSERVED = AT_ONCE._replace(config=replace(AT_ONCE.config, metrics=False, trace_events=0))
NIXL: Any = NixlTransport
STAGED = Means("staged", NIXL, replace(AT_ONCE.config, mode=TransferMode.STAGED))


class Recorder(Observer):
    """Writes down which events came, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        for event in EVENTS:
            setattr(self, event, lambda *args, event=event: self.seen.append((event, args)))

    def of_the_room(self) -> Iterator[str]:
        """Return the events of a room, without immediate repetitions."""
        names = [name for event, args in self.seen for name in self._named(event, args)]
        return (name for name, _ in itertools.groupby(names))

    def _named(self, event: str, args: tuple[Any, ...]) -> Iterator[str]:
        match event:
            case "frame_in" | "frame_out":
                body = args[-1].body
                if isinstance(body, RoomMessage):
                    yield f"{event} {type(body).__name__}"
            case "step":
                yield f"step {args[1]}"
            case "copy":
                yield f"copy {args[2]}"
            case "room_opened" | "write" | "room_ended":
                yield event


def carry(pair: Pair) -> None:
    """Move one room, and see that it has arrived."""
    ours, theirs = pair.pools
    for number, pool in enumerate(ours):
        pool[:] = np.random.default_rng(number).integers(1, 255, pool.shape)
    pages = list(range(NUM_PAGES))
    out = pair.source.open("r")
    into = pair.target.receive("r", prefill=pair.view, tokens=NUM_PAGES * 4, pages=pages)
    out.push((0, NUM_PAGES * 4), pages)
    out.close()
    assert isinstance(into.wait(WAIT_S), Done)
    assert isinstance(out.wait(WAIT_S), Done)
    for handle in (out, into):
        handle.wait_released(WAIT_S)
    assert all(np.array_equal(*both) for both in zip(ours, theirs, strict=True))


def test_a_room_moves_without_observers() -> None:
    with pair_by(UNOBSERVED) as pair:
        carry(pair)
        assert pair.source.stats == EndpointStats()
        assert pair.source.trace("r") is None
        assert pair.target.view().result(WAIT_S).num_open == 0
    assert list(pair.registry.collect()) == []


@pytest.mark.parametrize("beside", [AT_ONCE, UNOBSERVED], ids=["beside others", "alone"])
def test_an_observer_receives_a_rooms_events(beside: Any) -> None:
    """One after another; what waits for the engine or the peer may come sooner or later."""
    source, target = Recorder(), Recorder()
    with pair_by(beside, (source, target)) as pair:
        carry(pair)
    sent, received = list(source.of_the_room()), list(target.of_the_room())
    assert (sent[0], sent[-1]) == ("room_opened", "room_ended")
    assert in_order(sent, "frame_in Offer", "write", "frame_out Close")
    assert in_order(sent, "room_opened", "step pushed", "write")
    assert in_order(sent, "frame_out Close", "frame_in Complete", "room_ended")
    assert in_order(received, "room_opened", "frame_out Offer", "frame_in Close", "room_ended")
    assert {"link_up", "status"} <= {event for event, _ in source.seen}


def test_an_observer_receives_staging_copies() -> None:
    source, target = Recorder(), Recorder()
    with pair_by(STAGED, (source, target)) as pair:
        carry(pair)
    assert in_order(list(source.of_the_room()), "copy gathered", "room_ended")
    assert in_order(list(target.of_the_room()), "room_opened", "copy scattered", "room_ended")


def in_order(seen: list[str], *wanted: str) -> bool:
    rest = iter(seen)
    return all(one in rest for one in wanted)


def test_an_event_goes_directly_to_a_single_observer() -> None:
    one = Recorder()
    assert Observers(None, one).frame_in is one.frame_in
    Observers(None, None).thread_broken("transport_thread")


class Stalls(Observer):
    """Overrides one event."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def thread_stalled(self, thread: str, silent_s: float) -> None:
        self.seen.append((thread, silent_s))


def test_each_of_several_receives_what_it_overrides() -> None:
    first, second, other = Stalls(), Stalls(), Recorder()
    both = Observers(first, second, other)
    both.thread_stalled("transport_thread", 2.0)
    both.thread_broken("transport_thread")
    assert first.seen == second.seen == [("transport_thread", 2.0)]
    assert [event for event, _ in other.seen] == ["thread_stalled", "thread_broken"]
    both.use(first)
    both.thread_stalled("transport_thread", 0.0)
    both.thread_broken("transport_thread")
    assert (first.seen[-1], second.seen[-1], len(other.seen)) == (
        ("transport_thread", 0.0),
        ("transport_thread", 2.0),
        2,
    )
