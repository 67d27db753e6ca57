"""The scheduler side beside another connector, driven as vLLM's MultiConnector drives both.

``Pair`` follows MultiConnector's rules: the first connector with tokens loads them, the others are
told of zero external tokens with the same blocks, and a request's blocks are free once every
connector that asked to hold them has reported its end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    PullMetadata,
    ReceiveRoom,
)
from kvferry.connectors.vllm.paging import BlockSelector
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.scheduler import ConnectorScheduler

TOKENS, BLOCKS = 40, [[1, 2, 3]]
TO_PREFILL = {"do_remote_decode": True, "kvferry": {"room": "r"}}
TO_DECODE = {"do_remote_prefill": True, "kvferry": {"room": "r", "prefill": "prefill-0"}}


class Store:
    """A connector that keeps prompts and loads their first ``num_stored`` tokens.

    ``holds``: it still reads the blocks of a finished request.
    """

    def __init__(self, num_stored: int = 0, *, holds: bool = False, params: Any = None) -> None:
        self.num_stored = num_stored
        self._answer = (holds, params)
        self.loaded: list[int] = []

    def num_external_tokens(self, request: Any, num_computed: int) -> int:
        return max(0, self.num_stored - num_computed)

    def blocks_allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        if num_external:
            self.loaded.append(num_external)

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        return self._answer


class Finished(NamedTuple):
    """MultiConnector's result at a request's end, and how many connectors hold its blocks."""

    params: Any
    num_holding: int


class Pair:
    """kvferry and a store, in the order of vLLM's configuration."""

    def __init__(self, store: Store, *, ferry_first: bool = True) -> None:
        selector = BlockSelector(16)
        self.ferry = ConnectorScheduler(
            PrefillScheduler("prefill-0", selector),
            DecodeScheduler(selector),
            model="m",
            dtype="float32",
        )
        both = [self.ferry, store]
        self._connectors: list[Any] = both if ferry_first else both[::-1]
        self._chosen: Any = None

    def num_external_tokens(self, request: Any, num_computed: int) -> int:
        """Ask all connectors; the first that has tokens is chosen."""
        found = 0
        for connector in self._connectors:
            tokens = connector.num_external_tokens(request, num_computed)
            if tokens and not found:
                self._chosen, found = connector, tokens
        return found

    def allocate(self, request: Any, num_external: int) -> None:
        for connector in self._connectors:
            tokens = num_external if connector is self._chosen else 0
            connector.blocks_allocated(request, BLOCKS, tokens)

    def finish(self, request: Any, status: str = "FINISHED_LENGTH_CAPPED") -> Finished:
        request.status = SimpleNamespace(name=status)
        params: Any = None
        num_holding = 0
        for connector in self._connectors:
            holds, answer = connector.request_finished(request)
            num_holding += holds
            if answer is not None:
                params = (params or {}) | answer
        return Finished(params, num_holding)

    def step(
        self,
        *,
        first: int = 0,
        end: int = 0,
        is_new: bool = True,
        preempted: tuple[str, ...] = (),
        is_sync: bool = False,
    ) -> tuple[PrefillMetadata, DecodeMetadata, PullMetadata]:
        """Build the metadata of a step that computes the request's tokens up to ``end``."""
        names = ["a"] if end else []
        new = [SimpleNamespace(req_id="a", num_computed_tokens=first)] if end and is_new else []
        cached = [] if is_new else names
        return self.ferry.build_metadata(
            SimpleNamespace(
                preempted_req_ids=set(preempted),
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=cached, num_computed_tokens=[first] * len(cached)
                ),
                num_scheduled_tokens={"a": end - first},
                total_num_scheduled_tokens=end - first,
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: BLOCKS),
                has_sync_kv_loads=is_sync,
            )
        )


def request(params: Any) -> Any:
    return SimpleNamespace(
        request_id="a",
        kv_transfer_params=params,
        prompt_token_ids=list(range(TOKENS)),
        num_prompt_tokens=TOKENS,
        prompt_embeds=None,
        output_token_ids=[],
        lora_request=None,
        mm_features=[],
        cache_salt=None,
    )


def added(pair: Pair, params: Any) -> Any:
    made = request(params)
    pair.ferry.add_request(made)
    return made


# ---------------------------------------------------------------- decode


def test_the_first_connector_in_order_receives_at_decode() -> None:
    store = Store(32)
    pair = Pair(store)
    asked = added(pair, TO_DECODE)
    assert pair.num_external_tokens(asked, 0) == TOKENS
    pair.allocate(asked, TOKENS)
    (received,) = pair.step()[1].received
    assert (received.prefix, received.blocks) == (0, ((1, 2, 3),))
    assert store.loaded == []


def test_room_is_completed_without_data_if_the_store_loads() -> None:
    """Blocks are given, but zero external tokens: they belong to the store's load."""
    store = Store(32)
    pair = Pair(store, ferry_first=False)
    asked = added(pair, TO_DECODE)
    pair.allocate(asked, pair.num_external_tokens(asked, 0))
    (received,) = pair.step()[1].received
    assert (received.prefix, received.blocks) == (TOKENS, ())
    assert store.loaded == [32]
    # The second call, when the store's load has ended.
    pair.allocate(asked, 0)
    assert pair.step()[1].received == []


def test_end_of_the_stores_load_is_not_the_end_of_a_room() -> None:
    pair = Pair(Store(32), ferry_first=False)
    asked = added(pair, TO_DECODE)
    pair.allocate(asked, pair.num_external_tokens(asked, 0))
    pair.step()
    pair.ferry.transfers_ended((), ["a"], {})
    assert pair.finish(asked) == Finished(None, 0)
    decode = pair.step()[1]
    assert (decode.aborted, decode.declined) == ([], [])


def test_failed_room_leaves_the_prompt_to_the_store() -> None:
    """A room is requested once, so its blocks can't be filled again under the store's load."""
    store = Store(32)
    pair = Pair(store)
    asked = added(pair, TO_DECODE)
    pair.allocate(asked, pair.num_external_tokens(asked, 0))
    pair.step()
    pair.ferry.transfers_ended((), (), {"a": "peer-gone"})
    assert pair.step()[1].aborted == ["a"]
    pair.ferry.transfers_ended((), ["a"], {})
    assert pair.num_external_tokens(asked, 0) == 32
    pair.allocate(asked, 32)
    assert store.loaded == [32]
    decode = pair.step()[1]
    assert (decode.received, decode.aborted) == ([], [])


@pytest.mark.parametrize(
    ("state", "aborted", "declined"),
    [("waiting", [], [("r", "prefill-0")]), ("receiving", ["a"], []), ("received", [], [])],
)
@pytest.mark.parametrize("holds", [False, True])
def test_abort_at_decode_in_each_state(
    state: str, holds: bool, aborted: list[str], declined: list[tuple[str, str]]
) -> None:
    pair = Pair(Store(holds=holds))
    asked = added(pair, TO_DECODE)
    if state != "waiting":
        pair.allocate(asked, pair.num_external_tokens(asked, 0))
        pair.step()
    if state == "received":
        pair.ferry.transfers_ended((), ["a"], {})
    assert pair.finish(asked, "FINISHED_ABORTED") == Finished(None, int(holds))
    decode = pair.step()[1]
    assert (decode.aborted, decode.declined) == (aborted, declined)
    # The store's end of holding the blocks.
    pair.ferry.transfers_ended(["a"], (), {})
    assert pair.step()[1] == DecodeMetadata()


def test_request_preempted_at_decode_is_not_received_again() -> None:
    store = Store(16)
    pair = Pair(store)
    asked = added(pair, TO_DECODE)
    pair.allocate(asked, pair.num_external_tokens(asked, 0))
    pair.step()
    pair.ferry.transfers_ended((), ["a"], {})
    assert pair.num_external_tokens(asked, 0) == 16
    pair.allocate(asked, 16)
    assert pair.step(preempted=("a",))[1].received == []
    assert store.loaded == [16]


# ---------------------------------------------------------------- prefill


@pytest.mark.parametrize("num_stored", [0, 32])
def test_cold_and_warm_prompts_are_carried_from_their_first_block(num_stored: int) -> None:
    store = Store(num_stored)
    pair = Pair(store)
    asked = added(pair, TO_PREFILL)
    pair.allocate(asked, pair.num_external_tokens(asked, 0))
    assert sum(store.loaded) == num_stored
    (push,) = pair.step(first=num_stored, end=TOKENS)[0].pushed
    assert (push.first_block, push.blocks, push.end) == (0, ((1, 2, 3),), TOKENS)


@pytest.mark.parametrize("nothing", [None, {}])
@pytest.mark.parametrize("params", [TO_PREFILL, {"do_remote_decode": True}])
@pytest.mark.parametrize("holds", [False, True])
def test_answer_and_hold_of_a_finished_prefill(params: Any, holds: bool, nothing: Any) -> None:
    pair = Pair(Store(holds=holds, params=nothing))
    asked = added(pair, params)
    pair.step(end=TOKENS)
    finished = pair.finish(asked)
    assert finished.num_holding == 1 + holds
    assert finished.params["kvferry"]["tokens"] == TOKENS
    assert [held.request for held in pair.step()[0].held] == ["a"]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}])
def test_without_a_room_nothing_is_answered(params: Any) -> None:
    """None, not {}: MultiConnector and proxies take {} for parameters."""
    pair = Pair(Store())
    asked = added(pair, params)
    assert pair.finish(asked, "FINISHED_ABORTED") == Finished(None, 0)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(
    ("params", "end", "num_held"),
    [
        (TO_PREFILL, 0, 1),
        (TO_PREFILL, 20, 1),
        (TO_PREFILL, TOKENS, 1),
        ({"do_remote_decode": True}, 0, 0),
        ({"do_remote_decode": True}, 20, 0),
        ({"do_remote_decode": True}, TOKENS, 0),
    ],
)
def test_abort_at_prefill_in_each_state(params: Any, end: int, num_held: int, holds: bool) -> None:
    """A decode may wait for a room that the caller chose, so its blocks are held."""
    pair = Pair(Store(holds=holds))
    asked = added(pair, params)
    pair.step(end=end)
    assert pair.finish(asked, "FINISHED_ABORTED").num_holding == num_held + holds
    assert len(pair.step()[0].held) == num_held


def test_preempted_prefill_is_loaded_and_carried_again() -> None:
    store = Store(32)
    pair = Pair(store)
    asked = added(pair, {"do_remote_decode": True})
    pair.step(end=20)
    lost = pair.step(preempted=("a",))[0]
    assert lost.forgotten
    pair.allocate(asked, pair.num_external_tokens(asked, 0))
    metadata = pair.step(first=32, end=TOKENS)[0]
    (push,) = metadata.pushed
    assert (push.first_block, push.blocks) == (0, ((1, 2, 3),))
    assert metadata.opened[0].room == push.room != lost.forgotten[0]


@pytest.mark.parametrize("is_sync", [False, True])
def test_room_is_pushed_late_if_a_load_may_fail_in_the_same_step(is_sync: bool) -> None:
    """vLLM learns after the step that a synchronous load failed, and then computes it again."""
    pair = Pair(Store(32))
    added(pair, TO_PREFILL)
    (opened,) = pair.step(first=32, end=TOKENS, is_sync=is_sync)[0].opened
    assert opened.is_late == is_sync


def test_receive_covers_what_the_cache_and_the_store_lack() -> None:
    pair = Pair(Store())
    asked = added(pair, TO_DECODE)
    assert pair.num_external_tokens(asked, 16) == TOKENS - 16
    pair.allocate(asked, TOKENS - 16)
    (received,) = pair.step()[1].received
    assert isinstance(received, ReceiveRoom)
    assert received.prefix == 16
