"""Pulls on the scheduler's side, between two engines with stand-ins for vLLM's pools."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count

import pytest
from connectors.vllm.pulls.block_pools import BLOCK, Pool, chain_of, compute, request_of

from kvferry import Room
from kvferry.connectors.vllm.metadata import PullPrefix, RankReport
from kvferry.connectors.vllm.pulls.lookup_channel import LookupQuestion, LookupServer, PendingLookup
from kvferry.connectors.vllm.pulls.prefix_cache import PrefixCache
from kvferry.connectors.vllm.pulls.pull_scheduler import PrefixAsker, PrefixHolder, PullScheduler

NUM_RANKS = 2
HISTORY = list(range(100, 100 + 4 * BLOCK + 5))
PROMPT = [*HISTORY, 1, 2, 3]


class Lookups(LookupServer):
    """Look-ups without a socket."""

    address = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._pending = []  # type: ignore[assignment]

    def take(self) -> PendingLookup | None:
        return self._pending.pop() if self._pending else None

    def ask(self, order: PullPrefix) -> Future[int]:
        held: Future[int] = Future()
        question = LookupQuestion(order.room, order.chain.short, order.prefix, 10.0)
        self._pending.append(PendingLookup(question, held))
        return held


class Engine:
    """An engine that holds and asks."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = Pool(num_blocks)
        self.cache = PrefixCache(self.pool, BLOCK)
        self.lookups = Lookups()
        self.holder = PrefixHolder(self.cache, self.lookups)
        rooms = count(1)
        self.asker = PrefixAsker(self.cache, NUM_RANKS, lambda: next(rooms))
        self.pulls = PullScheduler(NUM_RANKS, self.holder, self.asker)

    def finish(self, tokens: list[int]) -> None:
        compute(self.pool, tokens)
        self.cache.remember(chain_of(tokens), request_of(tokens).block_hashes)

    def report(self, **of_a_rank: object) -> None:
        self.pulls.report(RankReport(**of_a_rank))  # type: ignore[arg-type]

    def ended(self, room: Room, *tokens: int | None) -> None:
        self.report(pulled={room: list(tokens)})

    def released(self, room: Room) -> None:
        for _ in range(NUM_RANKS):
            self.report(received={room: 1})


def asked(engine: Engine, num_computed: int = 0) -> PullPrefix:
    request = request_of(PROMPT)
    engine.asker.add_request(request, "holder", chain_of(PROMPT))
    assert engine.asker.is_pulling(request, num_computed)
    assert engine.asker.is_pulling(request, num_computed), "until all ranks have it"
    (order,) = engine.pulls.take_metadata().asked
    return order


def is_pulling(engine: Engine) -> bool:
    return engine.asker.is_pulling(request_of(PROMPT), 0)


def test_what_the_holder_has_is_cached_at_the_asker() -> None:
    holder, asker = Engine(), Engine()
    holder.finish(HISTORY)
    order = asked(asker)
    assert (order.prefix, order.chain.num_tokens, len(order.blocks[0])) == (0, 4 * BLOCK, 4)
    held = holder.lookups.ask(order)
    assert holder.pulls.needs_step()
    (sent,) = holder.pulls.take_metadata().sent
    assert held.result(0) == sent.tokens == 4 * BLOCK
    assert sent.digest == order.chain.digest(sent.tokens)
    assert len(holder.pool) == 4
    asker.ended(order.room, sent.tokens)
    assert is_pulling(asker)
    asker.ended(order.room, sent.tokens)
    assert not is_pulling(asker)
    assert list(asker.pool.cached) == request_of(PROMPT).block_hashes
    for engine, rooms in (
        (holder, {"sent": {order.room: 1}}),
        (asker, {"received": {order.room: 1}}),
    ):
        engine.report(**rooms)
        assert engine.pulls.needs_step()
        assert len(engine.pool) == 4, "a rank may still use them"
        engine.report(**rooms)
        assert not engine.pulls.needs_step()
        assert len(engine.pool) == 0


def test_only_what_is_missing_is_asked_for() -> None:
    engine = Engine()
    engine.finish(HISTORY[: 2 * BLOCK])
    order = asked(engine, 2 * BLOCK)
    assert order.prefix == 2 * BLOCK
    cached = [engine.pool.cached[each].block_id for each in request_of(PROMPT).block_hashes[:2]]
    assert list(order.blocks[0][:2]) == cached
    assert len(set(order.blocks[0])) == 4


def test_a_shorter_answer_is_cached_to_its_last_whole_block() -> None:
    engine = Engine()
    order = asked(engine)
    engine.ended(order.room, *[2 * BLOCK + 16] * NUM_RANKS)
    engine.released(order.room)
    assert list(engine.pool.cached) == request_of(PROMPT).block_hashes[:2]


@pytest.mark.parametrize("tokens", [(0, 0), (4 * BLOCK, None), (None, None)])
def test_what_a_rank_lacks_is_computed(tokens: tuple[int | None, ...]) -> None:
    engine = Engine()
    order = asked(engine)
    for each in tokens:
        engine.ended(order.room, each)
    assert not is_pulling(engine)
    aborted = engine.pulls.take_metadata().aborted
    assert aborted == [order.room] * tokens.count(None), "by the ranks that have not failed"
    assert engine.pool.cached == {}
    assert len(engine.pool) == 4, "a failed room may still be written"
    engine.released(order.room)
    assert len(engine.pool) == 0


def test_a_request_that_ends_early_leaves_its_blocks_to_the_room() -> None:
    engine = Engine()
    order = asked(engine)
    engine.asker.request_finished("a")
    assert engine.pulls.take_metadata().aborted == [order.room]
    engine.ended(order.room, *[4 * BLOCK] * NUM_RANKS)
    assert engine.pool.cached == {}
    assert engine.pulls.needs_step()
    engine.released(order.room)
    assert not engine.pulls.needs_step()
    assert len(engine.pool) == 0


def test_nothing_is_asked_for_if_all_but_the_last_block_is_cached() -> None:
    engine = Engine()
    request = request_of(PROMPT[: 4 * BLOCK])
    engine.asker.add_request(request, "holder", chain_of(PROMPT[: 4 * BLOCK]))
    assert not engine.asker.is_pulling(request, 3 * BLOCK), "vLLM computes the last token"
    assert not engine.pulls.needs_step()


def test_vllm_decides_when_too_few_blocks_are_free() -> None:
    engine = Engine(5)
    taken = engine.pool.get_new_blocks(2)
    request = request_of(PROMPT)
    engine.asker.add_request(request, "holder", chain_of(PROMPT))
    assert not engine.asker.is_pulling(request, 0)
    engine.pool.free_blocks(taken)
    assert not engine.asker.is_pulling(request, 0), "vLLM may have begun to schedule it"
    assert engine.pulls.take_metadata().asked == []


def test_an_answer_that_is_no_use_pins_nothing() -> None:
    holder, asker = Engine(), Engine()
    holder.finish(HISTORY[: 2 * BLOCK])
    asker.finish(HISTORY[: 2 * BLOCK])
    order = asked(asker, 2 * BLOCK)
    held = holder.lookups.ask(order)
    assert holder.pulls.take_metadata().sent == []
    assert held.result(0) == 0
    assert len(holder.pool) == 0


def test_a_room_is_pinned_once() -> None:
    holder, asker = Engine(), Engine()
    holder.finish(HISTORY)
    order = asked(asker)
    answers = [holder.lookups.ask(order) for _ in range(2)]
    assert len(holder.pulls.take_metadata().sent) == 1
    assert sorted(each.result(0) for each in answers) == [0, 4 * BLOCK]
    assert len(holder.pool) == 4


def test_an_engine_without_pulls_has_nothing_to_do() -> None:
    pulls = PullScheduler(1, None, None)
    assert not pulls.needs_step()
    pulls.report(RankReport())
    assert pulls.take_metadata().address is None
