"""Two endpoints in one process with all their threads: every byte, every way a room ends."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from endpoint.fleets import HEADS, QUICK, eventually, layout, view_of
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.config import EndpointConfig, ProofMode
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.errors import Misuse
from kvferry.ids import Op
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.pools import Memory
from kvferry.plan.bind import Binding
from kvferry.plan.choose import TransferMode
from kvferry.protocol.events import WriteFate
from kvferry.protocol.outcome import Done, Failure, FailureCode, Status
from kvferry.telemetry.observer import Observer
from kvferry.transports.base import RemoteMemory, TransportSetup, WriteEnded
from kvferry.transports.shm import ShmTransport

LAYOUT = layout(HEADS, 4)
NUM_PAGES = 16
WAIT_S = 15.0


class ViaThread(ShmTransport):
    """Shared memory whose writes the transport thread makes."""

    name: ClassVar[str] = "shm"
    supports_write_now: ClassVar[bool] = False


class AlwaysBusy(ShmTransport):
    """Shared memory whose inline writes are always refused as busy."""

    name: ClassVar[str] = "shm"

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        self._ended.append(super().write_now(remote, op, pieces))
        self.on_completion()

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded:
        return WriteEnded(op, WriteFate.BUSY)


class Asynchronous(AlwaysBusy):
    """Shared memory whose inline writes end only after several polls."""

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._looks: dict[Op, tuple[int, WriteEnded]] = {}

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:  # type: ignore[override]
        self._looks[op] = 3, ShmTransport.write_now(self, remote, op, pieces)
        return None

    def check_write(self, op: Op) -> WriteEnded | None:
        left, ended = self._looks.pop(op)
        if left:
            self._looks[op] = left - 1, ended
            return None
        return ended


class Means(NamedTuple):
    name: str
    transport: type[ShmTransport]
    config: EndpointConfig

    def __str__(self) -> str:
        return self.name


AT_ONCE = Means("at-once", ShmTransport, EndpointConfig(protocol=QUICK))
MOVED = Means("moved", ViaThread, EndpointConfig(protocol=QUICK))
BUSY = Means("busy", AlwaysBusy, EndpointConfig(protocol=QUICK))
ASYNCHRONOUS = Means("asynchronous", Asynchronous, EndpointConfig(protocol=QUICK))
NUMBERS = itertools.count()


class Pair(NamedTuple):
    """A source and a target."""

    source: SourceEndpoint
    target: TargetEndpoint
    view: InstanceView
    pools: tuple[list[np.ndarray], list[np.ndarray]]
    registry: CollectorRegistry

    def of(self, metric: str, **labels: str) -> float:
        labels |= {"endpoint": "p/0", "transport": "shm"}
        return self.registry.get_sample_value(f"kvferry_{metric}", labels) or 0.0


def _arrays(owners: Any) -> list[np.ndarray]:
    return [np.asarray(each).view(np.uint8) for each in owners]


@contextlib.contextmanager
def pair_by(
    means: Means, observers: tuple[Observer | None, Observer | None] = (None, None)
) -> Iterator[Pair]:
    setups = [TransportSetup(agent=f"pair-{next(NUMBERS)}", copy=copy_binding) for _ in range(2)]
    ours, theirs = (means.transport(setup) for setup in setups)
    memories = [Memory.allocate(LAYOUT, 0, NUM_PAGES, each.allocate) for each in (ours, theirs)]
    pools = [_arrays(memory.owners) for memory in memories]
    registry = CollectorRegistry()
    with (
        SourceEndpoint(
            *(LAYOUT, memories[0]),
            name="p",
            model="m",
            transport=ours,
            config=means.config,
            registry=registry,
            observer=observers[0],
        ) as source,
        TargetEndpoint(
            *(LAYOUT, memories[1]),
            name="d",
            model="m",
            transport=theirs,
            config=means.config,
            registry=registry,
            observer=observers[1],
        ) as target,
    ):
        yield Pair(source, target, view_of(source.record), (pools[0], pools[1]), registry)


@pytest.mark.parametrize("means", [AT_ONCE, MOVED, BUSY, ASYNCHRONOUS], ids=str)
def test_every_byte_arrives(means: Means) -> None:
    with pair_by(means) as pair:
        ours, theirs = pair.pools
        for number, pool in enumerate(ours):
            pool[:] = np.random.default_rng(number).integers(1, 255, pool.shape)
        num_tokens, half = NUM_PAGES * 4, NUM_PAGES // 2
        pages = list(range(NUM_PAGES))
        into = pair.target.receive("r", prefill=pair.view, tokens=num_tokens, pages=pages)
        out = pair.source.open("r")
        out.prepare((0, num_tokens // 2), pages[:half])
        out.push((0, num_tokens // 2), pages[:half])
        out.push((num_tokens // 2, num_tokens), pages[half:])
        out.close(b"first token")
        assert into.wait(WAIT_S) == Done(b"first token")
        assert into.metadata == b"first token"
        assert isinstance(out.wait(WAIT_S), Done)
        assert [each.status for each in (out, into)] == [Status.DONE] * 2
        for sent, got in zip(ours, theirs, strict=True):
            assert np.array_equal(sent, got)
        for handle in (out, into):
            handle.wait_released(WAIT_S)
        num_bytes = sum(pool.nbytes for pool in ours)
        assert sum(pair.of("bytes_total", mode=mode) for mode in TransferMode) == num_bytes
        assert pair.of("rooms_total", outcome="done", reason="") == 1
        # The next room works like the first.
        again = pair.target.receive("s", prefill=pair.view, tokens=4, pages=[0])
        next_out = pair.source.open("s")
        next_out.push((0, 4), [1])
        next_out.close()
        assert isinstance(again.wait(WAIT_S), Done)
        assert isinstance(next_out.wait(WAIT_S), Done)
        next_out.wait_released(WAIT_S)
    assert pair.source.close()
    assert pair.target.close()


def test_arrays_of_the_engine_are_moved_into_shared_memory() -> None:
    """The engine's tensors become views of the shared memory."""
    kept, given = (torch.rand(3, NUM_PAGES, 4, 12, 14).to(torch.bfloat16) for _ in range(2))
    ours, theirs = ({"kv": {"k": each[..., :8], "v": each[..., 8:]}} for each in (given, kept))
    config = AT_ONCE.config
    with (
        SourceEndpoint(LAYOUT, ours, name="p", model="m", transport="shm", config=config) as source,
        TargetEndpoint(
            LAYOUT, theirs, name="d", model="m", transport="shm", config=config
        ) as target,
    ):
        pages = list(range(NUM_PAGES))
        into = target.receive(
            "r", prefill=view_of(source.record), tokens=4 * NUM_PAGES, pages=pages[::-1]
        )
        out = source.open("r")
        out.push((0, 4 * NUM_PAGES), pages)
        out.close()
        assert isinstance(into.wait(WAIT_S), Done)
        assert torch.equal(kept, given.flip(1))


def code(outcome: object) -> FailureCode | None:
    return outcome.code if isinstance(outcome, Failure) else None


@pytest.mark.parametrize("who", ["source", "target"])
def test_either_side_may_abort_a_room(who: str) -> None:
    with pair_by(MOVED) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=8, pages=[0, 1])
        out = pair.source.open("r")
        out.push((0, 4), [0])
        eventually(lambda: out.status is not Status.CONNECTING)
        (out if who == "source" else into).abort()
        for handle in (out, into):
            assert code(handle.wait(WAIT_S)) is FailureCode.ABORTED
            handle.wait_released(WAIT_S)
            assert handle.status is Status.FAILED


def test_a_room_whose_sides_disagree_fails_alone() -> None:
    with pair_by(AT_ONCE) as pair:
        both = [pair.target.receive(r, prefill=pair.view, tokens=4, pages=[0]) for r in "ab"]
        wrong, right = pair.source.open("a"), pair.source.open("b")
        wrong.push((0, 4), [0])
        wrong.close(tokens=2)
        for handle in (wrong, both[0]):
            assert code(handle.wait(WAIT_S)) is FailureCode.TOKENS_DIFFER
        right.push((0, 4), [1])
        right.close()
        assert isinstance(both[1].wait(WAIT_S), Done)
        assert isinstance(right.wait(WAIT_S), Done)


def test_a_room_that_is_never_filled_fails_at_its_deadline() -> None:
    with pair_by(AT_ONCE) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=4, pages=[0], deadline_s=0.3)
        out = pair.source.open("r", deadline_s=0.3)
        assert code(into.wait(WAIT_S)) is FailureCode.DEADLINE
        assert code(out.wait(WAIT_S)) is FailureCode.DEADLINE
        for handle in (out, into):
            handle.wait_released(WAIT_S)
        pair.source.open("twice")
        with pytest.raises(Misuse, match="open already"):
            pair.source.open("twice")


def test_closing_one_endpoint_fails_the_rooms_of_the_other() -> None:
    with pair_by(MOVED) as pair:
        into = pair.target.receive("r", prefill=pair.view, tokens=4, pages=[0])
        out = pair.source.open("r")
        out.push((0, 4), [0])
        eventually(lambda: out.status is not Status.CONNECTING)
        assert pair.source.close()
        assert isinstance(out.outcome, Failure)
        assert isinstance(into.wait(WAIT_S), Failure)
        into.wait_released(WAIT_S)


class Computing:
    """A GPU event that happens after a number of queries."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.happened = threading.Event()

    def query(self) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.happened.set()
        return self.left <= 0


def test_the_event_of_a_waiting_push_is_polled_without_other_activity() -> None:
    with pair_by(AT_ONCE) as pair:
        after = Computing(300)
        pair.source.open("r").push((0, 4), [0], after)
        assert after.happened.wait(WAIT_S)


def test_a_proof_reads_pages_after_the_events_of_their_pushes() -> None:
    proven = AT_ONCE._replace(config=replace(AT_ONCE.config, proof=ProofMode.FULL))
    with pair_by(proven) as pair:

        class Filling(Computing):
            """An event of a kernel that fills the pages."""

            def query(self) -> bool:
                happens = super().query()
                for number, pool in enumerate(pair.pools[0] if happens else ()):
                    pool[:] = np.random.default_rng(number).integers(1, 255, pool.shape)
                return happens

        into = pair.target.receive("r", prefill=pair.view, tokens=4, pages=[1])
        out = pair.source.open("r")
        out.push((0, 4), [0], Filling(300))
        out.close()
        assert isinstance(into.wait(WAIT_S), Done)
