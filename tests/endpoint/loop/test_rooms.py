"""The table of rooms: reports, releases, and failing all rooms."""

from __future__ import annotations

import pytest

from kvferry.endpoint.handles import Handle
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.errors import Misuse
from kvferry.ids import Peer
from kvferry.layout import Span
from kvferry.plan import Binding, Block
from kvferry.protocol.events import Report
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.telemetry.observer import Observer

ME = Peer("prefill", 0)
FAILURE = Failure.of(FailureCode.INTERNAL, "a bug")


def table_of(*handles: Handle) -> RoomTable[Handle]:
    rooms = RoomTable[Handle](ME, Observer())
    for handle in handles:
        rooms.add(handle)
    return rooms


def test_bindings_are_dropped_before_the_handle_is_released() -> None:
    handles = [Handle("a"), Handle("b")]
    rooms = table_of(*handles)
    for handle in handles:
        rooms.bindings.keep(handle.room, 0, Binding(()))
    seen: list[int] = []
    handles[0].on_release(lambda: seen.append(rooms.bindings.num_bindings))
    rooms.release("a")
    assert (seen, rooms.bindings.get("b", 0)) == ([1], Binding(()))
    assert ([handle.released for handle in handles], len(rooms)) == ([True, False], 1)


def test_unusable_blocks_are_set_before_the_failure_is_visible() -> None:
    failed, done = Handle("failed"), Handle("done")
    rooms = table_of(failed, done)
    seen: list[object] = []
    failed.on_end(lambda _: seen.append(failed.unusable))
    blocks = (Block("kv", Span(0, 1), Span(0, 4)),)
    rooms.report(Report("failed", FAILURE, blocks))
    rooms.report(Report("done", Done()))
    assert seen == [blocks]
    assert (failed.outcome, done.outcome) == (FAILURE, Done())


def test_failing_all_rooms_releases_no_memory_and_refuses_new_rooms() -> None:
    handles = [Handle("a"), Handle("b")]
    rooms = table_of(*handles)
    rooms.fail_all("a bug")
    assert [handle.failure for handle in handles] == [FAILURE] * 2
    # The failed thread may still write.
    assert [handle.released for handle in handles] == [False, False]
    with pytest.raises(Misuse, match="a bug"):
        rooms.add(Handle("c"))
