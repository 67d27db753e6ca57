"""The table of rooms: hooks before a release, and failing all rooms."""

from __future__ import annotations

import pytest

from kvferry.endpoint.handles import Handle
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.errors import Misuse
from kvferry.ids import Peer, Room
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.telemetry.observer import Observer

ME = Peer("prefill", 0)
FAILURE = Failure.of(FailureCode.INTERNAL, "a bug")


def table_of(*handles: Handle) -> RoomTable[Handle]:
    rooms = RoomTable[Handle](ME, Observer())
    for handle in handles:
        rooms.add(handle)
    return rooms


def test_the_release_hook_is_called_before_the_handle_is_released() -> None:
    handles = {name: Handle(name) for name in ("a", "b")}
    rooms = table_of(*handles.values())
    seen: list[tuple[Room, bool]] = []
    rooms.before_release = lambda room: seen.append((room, handles[str(room)].released))
    for name in handles:
        rooms.release(name)
    assert seen == [("a", False), ("b", False)]
    assert [handle.released for handle in handles.values()] == [True, True]
    assert len(rooms) == 0


def test_the_failure_hook_is_called_before_the_failure_is_visible() -> None:
    failed, done = Handle("failed"), Handle("done")
    rooms = table_of(failed, done)
    seen: list[tuple[Handle, object]] = []
    rooms.before_failure = lambda handle: seen.append((handle, handle.outcome))
    rooms.report("failed", FAILURE)
    rooms.report("done", Done())
    assert seen == [(failed, None)]
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
