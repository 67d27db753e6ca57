"""Requests to prefill for other instances."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connectors.vllm.metadata import HeldRoom, OpenRoom, PushTokens
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler


def make_scheduler() -> PrefillScheduler:
    rooms = iter(["r1", "r2", "r3"])
    return PrefillScheduler("prefill-0", BlockSelector(16), room=lambda: next(rooms))


def finished(scheduler: PrefillScheduler, *, is_answered: bool = True) -> Any:
    return scheduler.request_finished("a", is_answered=is_answered)


def test_each_chunk_is_pushed_and_the_last_one_closes_the_room() -> None:
    scheduler = make_scheduler()
    assert scheduler.add_request("a", None, 40, b"d")
    scheduler.scheduled("a", 20, [[5, 6]])
    metadata = scheduler.take_metadata()
    assert metadata.opened == [OpenRoom("a", "r1", 40, is_late=True)]
    assert metadata.pushed == [PushTokens("r1", 20, 0, ((5, 6),))]
    scheduler.scheduled("a", 41, [[5, 6, 7]])  # the step also computes a token of the answer
    assert scheduler.take_metadata().pushed == [PushTokens("r1", 40, 1, ((6, 7),), b"d")]
    scheduler.scheduled("a", 42, [[5, 6, 7]])
    assert scheduler.take_metadata().pushed == []
    held, params = finished(scheduler)
    assert held
    assert params is not None
    assert params["kvferry"] == {"room": "r1", "prefill": "prefill-0", "tokens": 40}
    assert scheduler.take_metadata().held == [HeldRoom("a", "r1")]
    assert len(scheduler) == 0


@pytest.mark.parametrize("may_wait", [(True, True), (True, False), (False,)])
def test_an_idle_step_leaves_a_late_room_to_the_next_one(may_wait: tuple[bool, ...]) -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", None, 40, b"d")
    scheduler.scheduled("a", 40, [[5, 6, 7]])
    scheduler.take_metadata()
    finished(scheduler)
    held = [scheduler.take_metadata(may_wait=each).held for each in may_wait]
    assert held == [*([] for _ in may_wait[1:]), [HeldRoom("a", "r1")]]
    assert scheduler.take_metadata().held == []


def test_a_room_of_the_caller_is_held_at_once() -> None:
    """Decode may have taken it already."""
    scheduler = make_scheduler()
    scheduler.add_request("a", 7, 40, b"d")
    scheduler.scheduled("a", 40, [[5, 6, 7]])
    scheduler.take_metadata()
    finished(scheduler)
    assert scheduler.take_metadata(may_wait=True).held == [HeldRoom("a", 7)]


def test_cached_prefix_is_pushed_with_the_first_chunk() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", None, 40, b"d")
    scheduler.scheduled("a", 40, [[5, 6, 7]])
    assert scheduler.take_metadata().pushed == [PushTokens("r1", 40, 0, ((5, 6, 7),), b"d")]


def test_preempted_request_gets_a_new_room() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", None, 40, b"d")
    scheduler.scheduled("a", 20, [[5, 6]])
    scheduler.take_metadata()
    scheduler.preempted("a")
    scheduler.scheduled("a", 40, [[1, 2, 3]])
    metadata = scheduler.take_metadata()
    assert metadata.forgotten == ["r1"]
    assert metadata.opened == [OpenRoom("a", "r2", 40, is_late=True)]
    assert metadata.pushed == [PushTokens("r2", 40, 0, ((1, 2, 3),), b"d")]


def test_preempted_request_with_a_given_room_is_not_sent() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", 7, 40, b"d")
    scheduler.scheduled("a", 20, [[5, 6]])
    scheduler.preempted("a")
    assert scheduler.take_metadata().abandoned == [7]
    scheduler.scheduled("a", 40, [[1, 2, 3]])
    assert scheduler.take_metadata().pushed == []
    assert finished(scheduler) == (False, None)


def test_aborted_request_abandons_a_given_room_and_holds_its_blocks() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", 7, 40, b"d")
    scheduler.scheduled("a", 20, [[5, 6]])
    scheduler.take_metadata()
    assert finished(scheduler, is_answered=False) == (True, None)
    metadata = scheduler.take_metadata()
    assert (metadata.abandoned, metadata.held) == ([7], [HeldRoom("a", 7)])


@pytest.mark.parametrize("end", [20, 40])
def test_aborted_request_without_a_given_room_frees_its_blocks(end: int) -> None:
    """Nobody knows its room, also not if the abort comes while the last chunk is computed."""
    scheduler = make_scheduler()
    scheduler.add_request("a", None, 40, b"d")
    scheduler.scheduled("a", end, [[5, 6, 7]])
    scheduler.take_metadata()
    assert finished(scheduler, is_answered=False) == (False, None)
    metadata = scheduler.take_metadata()
    assert (metadata.abandoned, metadata.forgotten, metadata.held) == ([], ["r1"], [])


def test_request_that_was_never_scheduled_frees_its_blocks() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", None, 40, b"d")
    assert finished(scheduler) == (False, None)
    assert scheduler.take_metadata().opened == []


def test_given_room_is_abandoned_if_the_request_was_never_scheduled() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", 7, 40, b"d")
    assert finished(scheduler) == (True, None)
    metadata = scheduler.take_metadata()
    assert metadata.opened == [OpenRoom("a", 7, 40)]
    assert (metadata.abandoned, metadata.held) == ([7], [HeldRoom("a", 7)])


def test_given_room_belongs_to_one_request_until_released() -> None:
    scheduler = make_scheduler()
    assert scheduler.add_request("a", 7, 40, b"d")
    assert not scheduler.add_request("b", 7, 40, b"d")
    assert "b" not in scheduler
    finished(scheduler)
    assert not scheduler.add_request("c", 7, 40, b"d")
    scheduler.released("a")
    assert scheduler.add_request("d", 7, 40, b"d")


def test_room_with_the_first_token_is_closed_by_the_end_of_the_request() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", 7, 40, b"d", sends_token=True)
    scheduler.scheduled("a", 40, [[5, 6, 7]])
    metadata = scheduler.take_metadata()
    assert metadata.opened == [OpenRoom("a", 7, 40, awaits_token=True)]
    assert metadata.pushed == [PushTokens(7, 40, 0, ((5, 6, 7),), b"d")]
    held, _ = scheduler.request_finished("a", is_answered=True, token=11)
    assert held
    assert scheduler.take_metadata().held == [HeldRoom("a", 7, 11)]


def test_room_that_gets_no_first_token_is_abandoned() -> None:
    scheduler = make_scheduler()
    scheduler.add_request("a", 7, 40, b"d", sends_token=True)
    scheduler.scheduled("a", 40, [[5, 6, 7]])
    scheduler.take_metadata()
    scheduler.request_finished("a", is_answered=False)
    assert scheduler.take_metadata().abandoned == [7]
