"""Requests that another instance prefills."""

from __future__ import annotations

import pytest

from kvferry.connectors.vllm.decode_scheduler import (
    COMPUTED_WAIT_S,
    IDLE_WAIT_S,
    DecodeScheduler,
)
from kvferry.connectors.vllm.metadata import ReceiveRoom
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.params import DecodeParams

PARAMS = DecodeParams("r", "prefill-0")


def make_scheduler() -> DecodeScheduler:
    scheduler = DecodeScheduler(BlockSelector(16))
    scheduler.add_request("a", PARAMS, 40, b"d")
    return scheduler


def test_cached_prefix_is_not_received() -> None:
    scheduler = make_scheduler()
    assert scheduler.num_external_tokens("a", 16) == 24
    scheduler.blocks_allocated("a", 24, [[3, 1, 2]])
    metadata = scheduler.take_metadata()
    assert metadata.received == [ReceiveRoom("a", "r", "prefill-0", 40, 16, ((3, 1, 2),), b"d")]


def test_an_idle_step_waits_longer_for_a_prompt_that_prefill_has_answered() -> None:
    """Only prefill's answer has the number of tokens."""
    scheduler = DecodeScheduler(BlockSelector(16))
    waits = []
    for name, num_tokens in (("parallel", None), ("in turn", 40)):
        scheduler.add_request(name, DecodeParams(name, "prefill-0", num_tokens), 40, b"d")
        scheduler.blocks_allocated(name, 40, [[3, 1, 2]])
        waits.append(scheduler.take_metadata(may_wait=True).wait_s)
    # The next idle step asks for nothing.
    waits.append(scheduler.take_metadata(may_wait=True).wait_s)
    assert waits == [IDLE_WAIT_S, COMPUTED_WAIT_S, IDLE_WAIT_S]
    assert scheduler.take_metadata().wait_s == 0.0


def test_cache_is_requested_once() -> None:
    scheduler = make_scheduler()
    scheduler.blocks_allocated("a", 40, [[3, 1, 2]])
    scheduler.take_metadata()
    assert scheduler.num_external_tokens("a", 0) == 0  # it was preempted, or its room has failed
    scheduler.blocks_allocated("a", 0, [[3, 1, 2]])
    assert scheduler.take_metadata().received == []


def test_room_belongs_to_one_request() -> None:
    scheduler = make_scheduler()
    assert not scheduler.add_request("b", PARAMS, 40, b"d")
    assert scheduler.num_external_tokens("b", 0) == 0
    scheduler.request_finished("a")
    assert scheduler.add_request("c", PARAMS, 40, b"d")


def test_fully_cached_prompt_completes_the_room_without_data() -> None:
    scheduler = make_scheduler()
    scheduler.blocks_allocated("a", 0, [[3, 1, 2]])
    (received,) = scheduler.take_metadata().received
    assert (received.tokens, received.prefix, received.blocks) == (40, 40, ())


def test_request_that_finishes_early_is_aborted() -> None:
    scheduler = make_scheduler()
    scheduler.blocks_allocated("a", 40, [[3, 1, 2]])
    scheduler.take_metadata()
    scheduler.request_finished("a")
    assert scheduler.take_metadata().aborted == ["a"]
    assert len(scheduler) == 0


def test_request_without_blocks_is_declined() -> None:
    scheduler = make_scheduler()
    scheduler.request_finished("a")
    metadata = scheduler.take_metadata()
    assert (metadata.received, len(metadata.declined)) == ([], 1)


@pytest.mark.parametrize("limits", [(1, None), (None, 79), (1, 1)])
def test_rooms_beyond_the_limit_wait_for_another_to_end(limits: tuple[int | None, ...]) -> None:
    scheduler = DecodeScheduler(BlockSelector(16), *limits)
    for name in "ab":
        assert scheduler.add_request(name, DecodeParams(name, "prefill-0"), 40, b"d")
    assert scheduler.num_external_tokens("a", 0) == 40
    scheduler.blocks_allocated("a", 40, [[3, 1, 2]])
    assert scheduler.num_external_tokens("b", 0) is None
    assert scheduler.num_external_tokens("b", 40) == 0, "it is cached here"
    scheduler.ended("a")
    assert scheduler.num_external_tokens("b", 0) == 40
    scheduler.blocks_allocated("b", 40, [[4, 5, 6]])
    scheduler.request_finished("b")
    assert scheduler.add_request("c", PARAMS, 40, b"d")
    assert scheduler.num_external_tokens("c", 0) == 40


def test_failure_of_one_rank_aborts_the_others() -> None:
    scheduler = make_scheduler()
    scheduler.blocks_allocated("a", 40, [[3, 1, 2]])
    scheduler.take_metadata()
    scheduler.failed("a")
    assert scheduler.take_metadata().aborted == ["a"]
    scheduler.ended("a")
    scheduler.failed("a")
    scheduler.request_finished("a")
    assert scheduler.take_metadata().aborted == []
