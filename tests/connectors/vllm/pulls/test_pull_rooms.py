"""Pulls between the workers of two engines, over real endpoints and a real look-up channel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connectors.vllm.pulls.block_pools import chain_of
from connectors.vllm.test_worker import CONTENT, HEADS, LAYERS, Caches, caches

from kvferry import DiscoveryServer
from kvferry.connectors.vllm.caches import EngineShape
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    OpenRoom,
    PrefillMetadata,
    PullMetadata,
    PullPrefix,
    RankReport,
    SendPrefix,
)
from kvferry.connectors.vllm.pulls.lookup_channel import LookupServer
from kvferry.connectors.vllm.pulls.pull_rooms import PulledRoom
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.worker import ConnectorWorker

WAIT_S = 20.0
TOKENS = list(range(96))
THERE, HERE = (5, 0, 2, 1, 4, 3), (3, 1, 0)
# The holder's blocks have 16 tokens and keep heads first, the asker's 32 and keep tokens first.


class Worker:
    """A worker, its caches, and what it has reported."""

    def __init__(self, undo: ExitStack, url: str, name: str, held: Caches, **more: Any) -> None:
        extra = {"discovery": url, "instance": name, "transport": "shm"} | more
        self.own = ConnectorWorker(read_settings(extra), None, name, "m")
        self.caches = held
        tokens = next(iter(held.values())).shape[2]
        engine = EngineShape(1, (LAYERS,), 0, HEADS, tokens, on_cpu=False)
        self.own.register(held, engine, sends=True, receives=True, fails_early=False)
        undo.callback(self.own.close)
        self.reported = RankReport()
        self.steps_end = True

    def step(self, **pulls: Any) -> None:
        """Run a step that computes nothing."""
        metadata = PullMetadata(**pulls)
        self.own.begin_step(PrefillMetadata(), metadata)
        self.own.start_receives(DecodeMetadata(), metadata)
        if self.steps_end:
            self.own.end_step(PrefillMetadata())
        self.reported = self.reported.plus(self.own.take_report({}))

    def step_until(self, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not getattr(self.reported, what):
            assert time.monotonic() < deadline, f"nothing {what}"
            self.step()

    def content(self, blocks: Sequence[int], num_tokens: int) -> list[torch.Tensor]:
        return [
            torch.cat([layer[block] for block in blocks], dim=1)[:, :num_tokens]
            for layer in self.caches.values()
        ]


class Pair:
    """A holder whose scheduler pins ``num_held`` tokens, and an asker."""

    def __init__(self, undo: ExitStack, num_held: int, **asker: Any) -> None:
        discovery = DiscoveryServer().start()
        undo.callback(discovery.stop)
        self.lookups = LookupServer(lambda: None)
        self.holder = Worker(undo, discovery.url, "holder", caches(8, 16, nhd=False))
        self.asker = Worker(undo, discovery.url, "asker", caches(4, 32, nhd=True), **asker)
        self.num_held = num_held
        for layer in self.holder.caches.values():
            layer.copy_(torch.rand(layer.shape))
        self.holder.step(address=self.lookups.address)

    def answer(self, digest: bytes | None = None) -> None:
        """Answer the next look-up as the holder's scheduler, and run the step that sends."""
        while (pending := self.lookups.take()) is None:
            self.asker.step()
        asked, held = pending.question, self.num_held
        if held:
            blocks = (THERE[: held // 16],)
            own = chain_of(TOKENS).digest(held) if digest is None else digest
            order = SendPrefix(asked.room, held, blocks, own, asked.deadline_s)
            self.holder.step(sent=[order])
        pending.held.set_result(held)

    def pull(self, prefix: int = 0, holder: str = "holder") -> None:
        order = PullPrefix("room", holder, chain_of(TOKENS), prefix, (HERE,))
        self.asker.step(asked=[order])


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("prefix", [0, 32])
def test_a_part_of_the_chain_is_pulled(undo: ExitStack, prefix: int) -> None:
    pair = Pair(undo, 80)
    pair.pull(prefix)
    pair.answer()
    pair.asker.step_until("received")
    assert pair.asker.reported.pulled == {"room": [80]}
    sent, arrived = pair.holder.content(THERE, 80), pair.asker.content(HERE, 96)
    for there, here in zip(sent, arrived, strict=True):
        assert torch.equal(there[:, prefix:], here[:, prefix:80])
        assert not here[:, :prefix].any()
        assert not here[:, 80:].any()
    pair.holder.step_until("sent")
    counts = pair.holder.own.counts.take()
    assert counts is not None
    assert counts["bytes_sent"] == LAYERS * (80 - prefix) * HEADS * CONTENT * 2


def test_after_a_step_without_an_end_the_next_one_sends(undo: ExitStack) -> None:
    """vLLM 0.30 calls no hook at the end of a step that computes nothing."""
    pair = Pair(undo, 80)
    pair.holder.steps_end = False
    pair.pull()
    pair.answer()
    pair.holder.step()
    pair.asker.step_until("received")
    assert pair.asker.reported.pulled == {"room": [80]}


def test_a_holder_with_nothing_is_no_failure(undo: ExitStack) -> None:
    pair = Pair(undo, 0)
    pair.pull()
    pair.answer()
    pair.asker.step_until("received")
    assert pair.asker.reported.pulled == {"room": [0]}
    counts = pair.asker.own.counts.take()
    assert counts is not None
    assert counts["rooms_failed"] == 0


def test_other_content_than_asked_for_is_not_used(undo: ExitStack) -> None:
    pair = Pair(undo, 80)
    pair.pull()
    pair.answer(digest=chain_of(TOKENS[1:]).digest(80))
    pair.asker.step_until("received")
    assert pair.asker.reported.pulled == {"room": [None]}
    pair.holder.step_until("sent")


def test_an_unknown_holder_is_waited_for_until_the_pulls_deadline(undo: ExitStack) -> None:
    pair = Pair(undo, 0, pull_deadline_s=0.2)
    pair.pull(holder="nobody")
    pair.asker.step_until("received")
    assert pair.asker.reported.pulled == {"room": [None]}


def test_an_abort_ends_a_pull(undo: ExitStack) -> None:
    pair = Pair(undo, 0)
    pair.pull(holder="nobody")
    pair.asker.step(aborted=["room", "unknown"])
    pair.asker.step_until("received")
    assert pair.asker.reported.pulled == {"room": [None]}


def test_a_room_that_can_not_be_opened_is_given_back(undo: ExitStack) -> None:
    holder = Pair(undo, 0).holder
    holder.own.begin_step(PrefillMetadata([OpenRoom("p", "twice", 16)]))
    holder.step(sent=[SendPrefix("twice", 16, ((5,),), b"d", WAIT_S)])
    assert holder.reported.sent == {"twice": 1}


@pytest.mark.parametrize(
    ("failure", "released", "is_released"),
    [(None, False, True), ("timeout", False, False), ("timeout", True, True)],
)
def test_blocks_of_a_failed_pull_are_held_until_nothing_writes_them(
    failure: str | None, released: bool, is_released: bool
) -> None:
    handle: Any = SimpleNamespace(outcome="over", failure=failure, released=released)
    room = PulledRoom(handle, 0.0)
    assert room.is_done
    assert room.is_released is is_released
