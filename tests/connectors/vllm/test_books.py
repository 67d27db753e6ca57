"""The books of the scheduler's part, with vLLM's objects played by plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.metadata import OpenRoom, PushTokens, ReceiveRoom
from kvferry.connectors.vllm.paging import BlockCuts
from kvferry.connectors.vllm.params import DecodeParams
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.scheduler import ConnectorScheduler


def prefill_book() -> PrefillScheduler:
    rooms = iter(["r1", "r2", "r3"])
    return PrefillScheduler("prefill-0", BlockCuts(16), room=lambda: next(rooms))


# ---------------------------------------------------------------- prefill


def test_every_chunk_is_pushed_and_the_last_one_closes() -> None:
    book = prefill_book()
    assert book.begin("a", None, 40, b"d")
    book.scheduled("a", 20, [[5, 6]])
    orders = book.take_metadata()
    assert orders.opened == [OpenRoom("a", "r1", 40)]
    assert orders.pushed == [PushTokens("r1", 20, 0, ((5, 6),))]
    book.scheduled("a", 41, [[5, 6, 7]])  # the step also computes a token of the answer
    assert book.take_metadata().pushed == [PushTokens("r1", 40, 1, ((6, 7),), b"d")]
    book.scheduled("a", 42, [[5, 6, 7]])
    assert book.take_metadata().pushed == []
    held, params = book.finished("a")
    assert held
    assert params is not None
    assert params["kvferry"] == {"room": "r1", "prefill": "prefill-0", "tokens": 40}
    assert book.take_metadata().held == [("a", "r1")]
    assert len(book) == 0


def test_a_cached_beginning_is_pushed_with_the_first_chunk() -> None:
    book = prefill_book()
    book.begin("a", None, 40, b"d")
    book.scheduled("a", 40, [[5, 6, 7]])
    assert book.take_metadata().pushed == [PushTokens("r1", 40, 0, ((5, 6, 7),), b"d")]


def test_a_preempted_request_takes_another_room() -> None:
    book = prefill_book()
    book.begin("a", None, 40, b"d")
    book.scheduled("a", 20, [[5, 6]])
    book.take_metadata()
    book.preempted("a")
    book.scheduled("a", 40, [[1, 2, 3]])
    orders = book.take_metadata()
    assert orders.abandoned == ["r1"]
    assert orders.opened == [OpenRoom("a", "r2", 40)]
    assert orders.pushed == [PushTokens("r2", 40, 0, ((1, 2, 3),), b"d")]


def test_a_preempted_request_in_a_given_room_is_computed_for_nobody() -> None:
    book = prefill_book()
    book.begin("a", 7, 40, b"d")
    book.scheduled("a", 20, [[5, 6]])
    book.preempted("a")
    assert book.take_metadata().abandoned == [7]
    book.scheduled("a", 40, [[1, 2, 3]])
    assert book.take_metadata().pushed == []
    assert book.finished("a") == (False, None)


def test_an_aborted_request_gives_its_room_up_and_waits_for_its_blocks() -> None:
    book = prefill_book()
    book.begin("a", None, 40, b"d")
    book.scheduled("a", 20, [[5, 6]])
    book.take_metadata()
    assert book.finished("a") == (True, None)
    orders = book.take_metadata()
    assert (orders.abandoned, orders.held) == (["r1"], [("a", "r1")])


def test_a_request_that_never_began_frees_its_blocks() -> None:
    book = prefill_book()
    book.begin("a", None, 40, b"d")
    assert book.finished("a") == (False, None)
    assert book.take_metadata().opened == []


def test_who_waits_in_a_given_room_hears_that_it_never_began() -> None:
    book = prefill_book()
    book.begin("a", 7, 40, b"d")
    assert book.finished("a") == (True, None)
    orders = book.take_metadata()
    assert orders.opened == [OpenRoom("a", 7, 40)]
    assert (orders.abandoned, orders.held) == ([7], [("a", 7)])


def test_a_room_belongs_to_one_request_until_it_is_released() -> None:
    book = prefill_book()
    assert book.begin("a", 7, 40, b"d")
    assert not book.begin("b", 7, 40, b"d")
    assert "b" not in book
    book.finished("a")
    assert not book.begin("c", 7, 40, b"d")
    book.released("a")
    assert book.begin("d", 7, 40, b"d")


# ---------------------------------------------------------------- decode

ASKED = DecodeParams("r", "prefill-0")


def decode_book() -> DecodeScheduler:
    book = DecodeScheduler(BlockCuts(16))
    book.begin("a", ASKED, 40, b"d")
    return book


def test_what_is_cached_here_does_not_travel() -> None:
    book = decode_book()
    assert book.missing("a", 16) == 24
    book.allocated("a", 24, [[3, 1, 2]])
    orders = book.take_metadata()
    assert orders.received == [ReceiveRoom("a", "r", "prefill-0", 40, 16, ((3, 1, 2),), b"d")]


def test_a_request_is_asked_for_once() -> None:
    book = decode_book()
    book.allocated("a", 40, [[3, 1, 2]])
    book.take_metadata()
    assert book.missing("a", 0) == 0  # it was preempted, or its room has failed
    book.allocated("a", 0, [[3, 1, 2]])
    assert book.take_metadata().received == []


def test_one_room_has_one_request() -> None:
    book = decode_book()
    assert not book.begin("b", ASKED, 40, b"d")
    assert book.missing("b", 0) == 0
    book.finished("a")
    assert book.begin("c", ASKED, 40, b"d")


def test_prefill_hears_that_nothing_is_needed() -> None:
    book = decode_book()
    book.allocated("a", 0, [[3, 1, 2]])
    (order,) = book.take_metadata().received
    assert (order.tokens, order.prefix, order.blocks) == (40, 40, ())


def test_a_request_that_ends_early_is_given_up() -> None:
    book = decode_book()
    book.allocated("a", 40, [[3, 1, 2]])
    book.take_metadata()
    book.finished("a")
    assert book.take_metadata().aborted == ["a"]
    assert len(book) == 0


def test_a_request_that_was_refused_lets_prefill_go() -> None:
    book = decode_book()
    book.finished("a")
    orders = book.take_metadata()
    assert (orders.received, len(orders.declined)) == ([], 1)


def test_one_failed_rank_ends_the_others() -> None:
    book = decode_book()
    book.allocated("a", 40, [[3, 1, 2]])
    book.take_metadata()
    book.failed("a")
    assert book.take_metadata().aborted == ["a"]
    book.ended("a")
    book.failed("a")
    book.finished("a")
    assert book.take_metadata().aborted == []


# ---------------------------------------------------------------- vLLM's objects


def request(params: object, **more: Any) -> Any:
    given: dict[str, Any] = {"lora_request": None, "mm_features": [], "cache_salt": None}
    given |= {"prompt_embeds": None}
    given |= more
    ids = given.pop("prompt_token_ids", list(range(40)))
    return SimpleNamespace(
        request_id="a",
        kv_transfer_params=params,
        prompt_token_ids=ids,
        num_prompt_tokens=40 if ids is None else len(ids),
        **given,
    )


def part() -> ConnectorScheduler:
    return ConnectorScheduler(
        prefill_book(), DecodeScheduler(BlockCuts(16)), model="m", dtype="float32"
    )


def no_step() -> Any:
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        preempted_req_ids=None, scheduled_new_reqs=[], scheduled_cached_reqs=cached
    )


FROM_PREFILL = {
    "do_remote_prefill": True,
    "kvferry": {"room": "r", "prefill": "prefill-0", "tokens": 40},
}


def test_a_longer_prompt_at_decode_computes_the_rest_itself() -> None:
    scheduler = part()
    longer = request(FROM_PREFILL, prompt_token_ids=list(range(41)))
    scheduler.arrived(longer)
    assert scheduler.missing(longer, 0) == 40


def test_a_shorter_prompt_at_decode_takes_nothing() -> None:
    scheduler = part()
    shorter = request(FROM_PREFILL, prompt_token_ids=[0])
    scheduler.arrived(shorter)
    assert scheduler.missing(shorter, 0) == 0
    scheduler.finished(shorter)
    assert scheduler.step(no_step())[1].declined == [("r", "prefill-0")]


@pytest.mark.parametrize(
    "params",
    [{"do_remote_prefill": True}, {"do_remote_prefill": True, "kvferry": {"room": [1]}}, [], 7],
)
def test_what_can_not_be_used_is_computed_here(params: object) -> None:
    scheduler = part()
    bad = request(params)
    scheduler.arrived(bad)
    assert scheduler.missing(bad, 0) == 0
    assert scheduler.finished(bad) == (False, None)


@pytest.mark.parametrize("lacks", [{"prompt_token_ids": None}, {"prompt_embeds": object()}])
def test_a_prompt_of_more_than_ids_is_not_carried(lacks: dict[str, Any]) -> None:
    scheduler = part()
    for params in (FROM_PREFILL, {"do_remote_decode": True}):
        bare = request(params, **lacks)
        scheduler.arrived(bare)
        assert scheduler.missing(bare, 0) == 0
        assert scheduler.finished(bare) == (False, None)


def with_windows() -> ConnectorScheduler:
    books = prefill_book(), DecodeScheduler(BlockCuts(16))
    return ConnectorScheduler(*books, model="m", dtype="float32", leaves_last=True)


def test_behind_a_window_decode_computes_the_last_token_itself() -> None:
    scheduler = with_windows()
    ids = list(range(40))
    asked = request({"do_remote_decode": True}, prompt_token_ids=ids, _all_token_ids=list(ids))
    scheduler.arrived(asked)
    assert (asked.num_prompt_tokens, asked.max_tokens) == (39, 1)
    assert asked.prompt_token_ids == asked._all_token_ids == list(range(39))
    given = {"do_remote_prefill": True, "kvferry": {"room": "r", "prefill": "prefill-0"}}
    scheduler = with_windows()
    at_decode = request(given)
    scheduler.arrived(at_decode)
    assert scheduler.missing(at_decode, 0) == 39


@pytest.mark.parametrize("flag", ["do_remote_decode", "do_remote_prefill"])
def test_behind_a_window_one_token_is_nothing_to_carry(flag: str) -> None:
    scheduler = with_windows()
    short = request({flag: True, "kvferry": {"room": "r", "prefill": "p"}}, prompt_token_ids=[7])
    scheduler.arrived(short)
    assert short.prompt_token_ids == [7]
    assert scheduler.missing(short, 0) == 0
    assert scheduler.finished(short) == (False, None)
    assert scheduler.step(no_step())[1].received == []


def digest(**more: Any) -> bytes:
    scheduler = part()
    scheduler.arrived(request(FROM_PREFILL, **more))
    scheduler.allocated(request(None), [[1, 2, 3]], 40)
    (order,) = scheduler.step(no_step())[1].received
    return order.digest


def test_whatever_makes_caches_differ_is_in_the_digest() -> None:
    picture = SimpleNamespace(identifier="cat")
    digests = [
        digest(),
        digest(prompt_token_ids=[9, *range(1, 40)]),
        digest(cache_salt="tenant"),
        digest(lora_request=SimpleNamespace(lora_name="poet")),
        digest(mm_features=[picture]),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digest()
