"""The connector's scheduler side, with stand-ins for vLLM's objects."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from connectors.vllm.pulls.block_pools import BLOCK, Pool, chain_of, compute, request_of

from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.metadata import RankReport
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.pulls.lookup_channel import LookupServer
from kvferry.connectors.vllm.pulls.prefix_cache import PrefixCache
from kvferry.connectors.vllm.pulls.pull_scheduler import PrefixAsker, PrefixHolder, PullScheduler
from kvferry.connectors.vllm.scheduler import ConnectorScheduler


def request(params: object, **more: Any) -> Any:
    given: dict[str, Any] = {"lora_request": None, "mm_features": [], "cache_salt": None}
    given |= {"prompt_embeds": None, "output_token_ids": []}
    given |= more
    ids = given.pop("prompt_token_ids", list(range(40)))
    return SimpleNamespace(
        request_id="a",
        kv_transfer_params=params,
        prompt_token_ids=ids,
        num_prompt_tokens=40 if ids is None else len(ids),
        **given,
    )


def make_connector(*, num_left: int = 0) -> ConnectorScheduler:
    selector = BlockSelector(16)
    prefill, decode = PrefillScheduler("prefill-0", selector), DecodeScheduler(selector)
    return ConnectorScheduler(prefill, decode, model="m", dtype="float32", num_left=num_left)


def no_step() -> Any:
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        total_num_scheduled_tokens=0,
        has_sync_kv_loads=False,
    )


FROM_PREFILL = {
    "do_remote_prefill": True,
    "kvferry": {"room": "r", "prefill": "prefill-0", "tokens": 40},
}


def test_longer_prompt_at_decode_receives_the_computed_part() -> None:
    scheduler = make_connector()
    longer = request(FROM_PREFILL, prompt_token_ids=list(range(41)))
    scheduler.add_request(longer)
    assert scheduler.num_external_tokens(longer, 0) == 40


def test_shorter_prompt_at_decode_declines_the_room() -> None:
    scheduler = make_connector()
    shorter = request(FROM_PREFILL, prompt_token_ids=[0])
    scheduler.add_request(shorter)
    assert scheduler.num_external_tokens(shorter, 0) == 0
    scheduler.request_finished(shorter)
    assert scheduler.build_metadata(no_step())[1].declined == [("r", "prefill-0")]


@pytest.mark.parametrize(
    "params",
    [{"do_remote_prefill": True}, {"do_remote_prefill": True, "kvferry": {"room": [1]}}, [], 7],
)
def test_invalid_parameters_are_ignored(params: object) -> None:
    scheduler = make_connector()
    bad = request(params)
    scheduler.add_request(bad)
    assert scheduler.num_external_tokens(bad, 0) == 0
    assert scheduler.request_finished(bad) == (False, None)


@pytest.mark.parametrize("without", [{"prompt_token_ids": None}, {"prompt_embeds": object()}])
def test_prompt_with_embeddings_is_not_transferred(without: dict[str, Any]) -> None:
    scheduler = make_connector()
    for params in (FROM_PREFILL, {"do_remote_decode": True}):
        incomplete = request(params, **without)
        scheduler.add_request(incomplete)
        assert scheduler.num_external_tokens(incomplete, 0) == 0
        assert scheduler.request_finished(incomplete) == (False, None)


def make_connector_with_windows() -> ConnectorScheduler:
    return make_connector(num_left=1)


def test_window_layers_leave_the_last_token_to_decode() -> None:
    scheduler = make_connector_with_windows()
    ids = list(range(40))
    prefilled = request({"do_remote_decode": True}, prompt_token_ids=ids, _all_token_ids=list(ids))
    scheduler.add_request(prefilled)
    assert (prefilled.num_prompt_tokens, prefilled.max_tokens) == (39, 1)
    assert prefilled.prompt_token_ids == prefilled._all_token_ids == list(range(39))
    given = {"do_remote_prefill": True, "kvferry": {"room": "r", "prefill": "prefill-0"}}
    scheduler = make_connector_with_windows()
    at_decode = request(given)
    scheduler.add_request(at_decode)
    assert scheduler.num_external_tokens(at_decode, 0) == 39


def test_several_tokens_are_left_to_decode() -> None:
    scheduler = make_connector(num_left=3)
    prefilled = request({"do_remote_decode": True}, _all_token_ids=list(range(40)))
    scheduler.add_request(prefilled)
    assert (prefilled.num_prompt_tokens, prefilled.max_tokens) == (37, 1)
    at_decode = request({"do_remote_prefill": True, "kvferry": {"room": "r", "prefill": "p"}})
    scheduler.add_request(at_decode)
    assert scheduler.num_external_tokens(at_decode, 16) == 37 - 16


@pytest.mark.parametrize("flag", ["do_remote_decode", "do_remote_prefill"])
def test_window_layers_do_not_transfer_a_single_token(flag: str) -> None:
    scheduler = make_connector_with_windows()
    short = request({flag: True, "kvferry": {"room": "r", "prefill": "p"}}, prompt_token_ids=[7])
    scheduler.add_request(short)
    assert short.prompt_token_ids == [7]
    assert scheduler.num_external_tokens(short, 0) == 0
    assert scheduler.request_finished(short) == (False, None)
    assert scheduler.build_metadata(no_step())[1].received == []


def digest(**more: Any) -> bytes:
    scheduler = make_connector()
    scheduler.add_request(request(FROM_PREFILL, **more))
    scheduler.blocks_allocated(request(None), [[1, 2, 3]], 40)
    (received,) = scheduler.build_metadata(no_step())[1].received
    return received.digest


def test_digest_depends_on_everything_that_changes_the_cache() -> None:
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


def test_first_token_is_refused_if_decode_computes_the_last_tokens() -> None:
    params = {"do_remote_decode": True, "kvferry": {"room": 7, "first_token": True}}
    scheduler = make_connector(num_left=1)
    scheduler.add_request(request(params))
    assert scheduler.request_finished(request(params)) == (False, None)
    assert scheduler.build_metadata(no_step())[0].held == []


# ---------------------------------------------------------------- pulls

PULLED = {"do_remote_decode": True, "kvferry": {"room": "r", "holder": "decode-0"}}
SEQUENCE = list(range(3 * BLOCK))


def make_puller(pool: Pool) -> ConnectorScheduler:
    selector = BlockSelector(BLOCK)
    prefill, decode = PrefillScheduler("prefill-0", selector), DecodeScheduler(selector)
    scheduler = ConnectorScheduler(
        prefill, decode, model="m", dtype="float32", instance="prefill-0"
    )
    cache = PrefixCache(pool, BLOCK)
    lookups = LookupServer(lambda: None)
    scheduler.pulls = PullScheduler(1, PrefixHolder(cache, lookups), PrefixAsker(cache, 1))
    return scheduler


def puller(params: object, **more: Any) -> Any:
    hashes = request_of(SEQUENCE).block_hashes
    given = {"block_hashes": hashes, "num_tokens": len(SEQUENCE), "_all_token_ids": SEQUENCE}
    given |= {"prompt_token_ids": SEQUENCE, "skip_reading_prefix_cache": False}
    return request(params, **given | more)


def test_prefill_pulls_first_and_then_sends_the_whole_prompt() -> None:
    scheduler = make_puller(Pool())
    one = puller(PULLED)
    scheduler.add_request(one)
    assert scheduler.num_external_tokens(one, 0) is None
    (order,) = scheduler.build_metadata(no_step())[2].asked
    assert (order.holder, order.chain.num_tokens) == ("decode-0", 2 * BLOCK)
    report = RankReport(pulled={order.room: [2 * BLOCK]}, received=Counter([order.room]))
    scheduler.pulls.report(report)
    assert scheduler.num_external_tokens(one, 2 * BLOCK) == 0
    one.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    assert scheduler.request_finished(one)[0], "its room is the router's"


@pytest.mark.parametrize(
    ("params", "more"),
    [
        ({"do_remote_decode": True}, {}),
        ({"kvferry": {"holder": "prefill-0"}}, {}),
        ({"kvferry": {"holder": ["decode-0"]}}, {}),
        (PULLED, {"skip_reading_prefix_cache": True}),
        (PULLED, {"prompt_embeds": object()}),
    ],
    ids=["no holder", "itself", "malformed", "needs all logits", "embeddings"],
)
def test_nothing_is_pulled(params: object, more: dict[str, Any]) -> None:
    scheduler = make_puller(Pool())
    one = puller(params, **more)
    scheduler.add_request(one)
    assert scheduler.num_external_tokens(one, 0) == 0
    assert scheduler.build_metadata(no_step())[2].asked == []


def test_a_finished_request_can_be_found_by_others() -> None:
    scheduler = make_puller(pool := Pool())
    compute(pool, SEQUENCE)
    scheduler.request_finished(puller(None))
    assert scheduler.pulls.holder is not None
    other = make_puller(Pool())
    asking = puller(PULLED)
    other.add_request(asking)
    other.num_external_tokens(asking, 0)
    (order,) = other.build_metadata(no_step())[2].asked
    held = scheduler.pulls.holder.cache.pin(order.chain.short)
    assert (len(held.blocks), held.digest) == (2, order.chain.digest(2 * BLOCK))


def test_another_tenants_sequence_is_not_found() -> None:
    scheduler = make_puller(pool := Pool())
    compute(pool, SEQUENCE)
    scheduler.request_finished(puller(None, cache_salt="tenant"))
    assert scheduler.pulls.holder is not None
    assert scheduler.pulls.holder.cache.pin(chain_of(SEQUENCE).short).blocks == []
