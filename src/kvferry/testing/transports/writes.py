"""Cases about writes: their bytes, their ends, refused writes, and immediate writes."""

# Where a case's name says everything, it has no docstring.
# ruff: noqa: D102
from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.layout import CacheSpec, DType, Group, Layout, Order, Paged, Parallel, Tensor
from kvferry.plan import PagedView, PageTable, RankPair, Request, bind, contiguous_pools, reshard
from kvferry.plan.bind import Binding
from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.protocol.events import WriteFate
from kvferry.testing.transports.base import (
    KIB,
    MIB,
    Cases,
    Crew,
    check_succeeded,
    deliver,
    expect,
)
from kvferry.testing.transports.bindings import PlacedPiece, binding_of, grid
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.transports.base import WriteEnded


def scattered(seed: int, num_pieces: int, num_regions: int, region_bytes: int) -> Binding:
    """Return pieces of any length and alignment that do not overlap in the target."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 3, 16, 512, 777, 4096], num_pieces).tolist()
    starts = list(accumulate(lengths, initial=0))
    assert starts[-1] < region_bytes, "the pieces must fit into a region"
    return binding_of(
        PlacedPiece(
            int(rng.integers(region_bytes - length)),
            start,
            length,
            int(rng.integers(num_regions)),
            int(rng.integers(num_regions)),
        )
        for start, length in zip(starts[:-1], lengths, strict=True)
    )


def stripes(remote: int, num_writes: int) -> list[HostWrite]:
    """Return large writes, writes of many pieces and tiny ones, each in a MiB of its own."""
    shapes = [(1, MIB), (256, 3 * KIB), (1, 1)]
    writes = []
    for op in range(num_writes):
        num_rows, length = shapes[op % 3]
        base = [Base(0, 0, op * MIB)]
        binding = grid(num_rows, length, Stride(4 * KIB, 4 * KIB), base, base)
        writes.append(HostWrite(remote, op, binding))
    return writes


def check_stripes(target: PeerProcess, ended: list[WriteEnded]) -> None:
    """Check that the stripes that have ended are in the target's memory."""
    for one in ended:
        target.check_part(0, one.op * MIB, MIB)


class WriteCases(Cases):
    """Writes put the right bytes in the right places before they end."""

    def test_pieces_of_any_size_between_several_regions(self, crew: Crew) -> None:
        source, target = crew.source(*[MIB] * 3), crew.target(*[MIB] * 3)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, scattered(1, 200, 3, MIB)))
        deliver(source, target, HostWrite(remote, 2, scattered(2, 200, 3, MIB)))

    def test_one_large_piece(self, crew: Crew) -> None:
        source, target = crew.source(64 * MIB), crew.target(64 * MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 64 * MIB)])))

    def test_many_small_pieces(self, crew: Crew) -> None:
        """16,384 pieces of 512 bytes, apart from each other on both sides."""
        source, target = crew.source(16 * MIB), crew.target(32 * MIB)
        remote = source.connect(target.metadata)
        binding = grid(16384, 512, Stride(1024, 2048))
        deliver(source, target, HostWrite(remote, 1, binding), limit_s=60)

    def test_many_layers_in_many_regions(self, crew: Crew) -> None:
        """The same pieces from thirty-two bases, some of them in one region."""
        source, target = crew.source(*[64 * KIB] * 32), crew.target(*[256 * KIB] * 16)
        remote = source.connect(target.metadata)
        source_bases = [Base(layer, 31 - layer, 128) for layer in range(32)]
        target_bases = [Base(layer, layer % 16, layer // 16 * 128 * KIB) for layer in range(32)]
        binding = grid(16, 1000, Stride(2048, 4096), source_bases, target_bases)
        deliver(source, target, HostWrite(remote, 1, binding))

    def test_a_resharded_cache(self, crew: Crew) -> None:
        """A plan from one source to two targets with larger pages and heads first."""
        tensors = (Tensor("k", DType.BFLOAT16, 64), Tensor("v", DType.BFLOAT16, 32))
        spec = CacheSpec(4, (Group("kv", Paged(), (0, 1, 2, 3), 4, tensors),))
        prefill = Layout(spec, Parallel(tp=1), page_tokens=16)
        decode = Layout(spec, Parallel(tp=2), page_tokens=64, order=Order.HND)
        plan, request = reshard(prefill, decode), Request(300, prefix=5)
        from_, into = contiguous_pools(prefill, 0, 40), contiguous_pools(decode, 0, 10)
        rng = np.random.default_rng(3)
        source = crew.source(*from_.region_bytes)
        give = PagedView(from_.map, {"kv": PageTable(rng.permutation(40)[:19])})
        for rank in range(2):
            target = crew.target(*into.region_bytes)
            take = PagedView(into.map, {"kv": PageTable(rng.permutation(10)[:5])})
            binding = bind(plan, RankPair(0, rank), request, give, take)
            deliver(source, target, HostWrite(source.connect(target.metadata), rank, binding))

    def test_a_later_write_wins(self, crew: Crew) -> None:
        """Each write starts when the last has ended, and overwrites its bytes."""
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        for op in range(16):
            piece = PlacedPiece(op % 8 * 100 * KIB, 5, 100 * KIB)
            deliver(source, target, HostWrite(remote, op, binding_of([piece])))

    def test_many_writes_in_flight_to_several_peers(self, crew: Crew) -> None:
        source, targets = crew.source(4 * MIB), [crew.target(4 * MIB) for _ in range(2)]
        remotes = [source.connect(target.metadata) for target in targets]
        writes = []
        for op in range(64):
            which, at = op % 2, op // 2 * 128 * KIB
            pieces = [PlacedPiece(op * 60 * KIB + i * 5000, at + i * 8000, 3000) for i in range(12)]
            writes.append(HostWrite(remotes[which], op, binding_of(pieces)))
        source.write(*writes)
        check_succeeded(source.wait(num_ended=64), writes)
        for which, target in enumerate(targets):
            expect(source, target, *writes[which::2])
            target.check()

    def test_ended_writes_have_arrived(self, crew: Crew) -> None:
        """Each of many writes is looked for as soon as it has ended."""
        source, target = crew.source(48 * MIB), crew.target(48 * MIB)
        writes = stripes(source.connect(target.metadata), 48)
        expect(source, target, *writes)
        source.write(*writes)
        all_ended: list[WriteEnded] = []
        while len(all_ended) < 48:
            ended = source.wait(num_ended=1)
            assert ended, f"of 48 writes only {len(all_ended)} have ended"
            check_stripes(target, ended)
            all_ended += ended
        check_succeeded(all_ended, writes)
        target.check()

    def test_ended_writes_have_arrived_if_the_target_does_not_poll(self, crew: Crew) -> None:
        """A target that does not poll may delay a write, which then must not end either."""
        source, target = crew.source(24 * MIB), crew.target(24 * MIB)
        first, *writes = stripes(source.connect(target.metadata), 24)
        deliver(source, target, first)
        expect(source, target, *writes)
        with target.resting():
            source.write(*writes)
            early = source.wait(num_ended=len(writes), limit_s=0.3)
            check_stripes(target, early)
        late = source.wait(num_ended=len(writes) - len(early))
        check_succeeded([*early, *late], writes)
        target.check()

    def test_empty_writes(self, crew: Crew) -> None:
        """Writes without pieces, or with pieces of 0 bytes, succeed like those around them."""
        source, target = crew.source(KIB), crew.target(KIB)
        remote = source.connect(target.metadata)
        nothing = [[], [PlacedPiece(0, 0, 0)], [PlacedPiece(KIB, KIB, 0), PlacedPiece(5, 3, 0)]]
        bindings = [binding_of(pieces) for pieces in (*nothing, [PlacedPiece(0, 0, KIB)], *nothing)]
        deliver(source, target, *(HostWrite(remote, op, each) for op, each in enumerate(bindings)))


OUTSIDE = {
    "past the end of the target": PlacedPiece(0, 63 * KIB, 2 * KIB),
    "one byte past the end of the target": PlacedPiece(0, 63 * KIB, KIB + 1),
    "before the start of the target": PlacedPiece(0, -1, 16),
    "an unknown region of the target": PlacedPiece(0, 0, 16, target_region=2),
    "a negative region of the target": PlacedPiece(0, 0, 16, target_region=-1),
    "one byte past the end of the source": PlacedPiece(63 * KIB, 0, KIB + 1),
    "before the start of the source": PlacedPiece(-16, 0, 16),
    "an unknown region of the source": PlacedPiece(0, 0, 16, source_region=1),
    "far away": PlacedPiece(0, 1 << 45, 16),
}


class RefusalCases(Cases):
    """Nothing is written outside a region, and bad input harms nothing else."""

    @pytest.mark.parametrize("case", OUTSIDE)
    def test_a_piece_outside_its_region_fails_the_write(self, crew: Crew, case: str) -> None:
        """No byte of the write arrives, not even of its good pieces; the next write succeeds."""
        source, target = crew.source(64 * KIB), crew.target(64 * KIB, 64 * KIB)
        remote = source.connect(target.metadata)
        good = PlacedPiece(0, 0, 32 * KIB)
        source.write(HostWrite(remote, 1, binding_of([good, OUTSIDE[case]])))
        (ended,) = source.wait(num_ended=1)
        assert (ended.op, ended.fate) == (1, WriteFate.FAILED)
        assert ended.detail, "a failure must say what is wrong"
        target.check()
        deliver(source, target, HostWrite(remote, 2, binding_of([good])))

    def test_garbage_metadata_is_refused(self, crew: Crew) -> None:
        """Garbage raises ``TransportError``, and good metadata still works afterwards."""
        source, target = crew.source(64 * KIB), crew.target(64 * KIB)
        noise = np.random.default_rng(1).bytes(4096)
        half = target.metadata[: len(target.metadata) // 2]
        for garbage in (b"", b"garbage", noise, half, b"\0" * 100):
            with pytest.raises(TransportError):
                source.connect(garbage)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 64 * KIB)])))

    def test_nothing_is_missing(self) -> None:
        """``missing`` returns None if the transport can work; otherwise all cases are skipped."""
        assert self.kind.missing() is None
        assert self.kind.name == self.transport

    def test_processes_of_one_host_share_a_realm(self, crew: Crew) -> None:
        """Otherwise the handshake would refuse them."""
        assert crew.source(KIB).realm() == crew.target(KIB).realm()


class ImmediateWriteCases(Cases):
    """``write_now``, which any thread may call, reports a write's end at once or through ``look``.

    These cases are skipped for transports without it.
    """

    @pytest.fixture
    def immediate(self, crew: Crew) -> Crew:
        """Return the peers of one test if their transport has ``write_now``."""
        if not self.kind.supports_write_now:
            pytest.skip(f"{self.transport} has no write_now")
        return crew

    def test_immediate_writes(self, immediate: Crew) -> None:
        """Each write ends once, and its bytes have arrived by then."""
        source, target = immediate.source(*[MIB] * 3), immediate.target(*[MIB] * 3)
        remote = source.connect(target.metadata)
        bindings = [scattered(1, 200, 3, MIB), binding_of([]), scattered(2, 200, 3, MIB)]
        for op, binding in enumerate(bindings):
            write = HostWrite(remote, op, binding)
            ended = source.write_now([write]) or source.wait(num_ended=1)
            assert ended == [WriteEnded(Op(op))]
            expect(source, target, write)
            target.check()

    def test_an_immediate_write_outside_its_region_fails(self, immediate: Crew) -> None:
        """No byte of the write arrives, not even of its good pieces."""
        source, target = immediate.source(64 * KIB), immediate.target(64 * KIB, 64 * KIB)
        remote, good = source.connect(target.metadata), PlacedPiece(0, 0, 32 * KIB)
        for where, piece in OUTSIDE.items():
            (ended,) = source.write_now([HostWrite(remote, 1, binding_of([good, piece]))])
            assert (ended.op, ended.fate) == (1, WriteFate.FAILED), where
            assert ended.detail, "a failure must say what is wrong"
            target.check()

    def test_immediate_writes_of_two_threads(self, immediate: Crew) -> None:
        """Two threads write to one peer while the transport's own thread does, too."""
        source, target = immediate.source(48 * MIB), immediate.target(48 * MIB)
        remote = source.connect(target.metadata)
        writes = stripes(remote, 48)
        queued, shares = writes[::3], (writes[1::3], writes[2::3])
        ended = source.write_now(*shares, meanwhile=queued)
        ended += source.wait(num_ended=len(writes) - len(ended))
        check_succeeded(ended, writes)
        expect(source, target, *writes)
        target.check()
