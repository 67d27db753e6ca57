"""Cases in which everything goes well: what arrives, how much at once, and when it is told."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from kvferry.layout import CacheSpec, DType, Group, Layout, Order, Paged, Parallel, Tensor
from kvferry.plan import PageTable, Pair, Request, Side, bind, contiguous_pools, reshard
from kvferry.plan.bind import Binding
from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.testing.transports.base import Cases
from kvferry.testing.transports.bindings import Piece, after, binding_of, checksum, grid
from kvferry.testing.transports.crew import Crew, all_well, deliver
from kvferry.testing.transports.host import Write

KIB, MIB = 1 << 10, 1 << 20


def scattered(seed: int, num_pieces: int, num_regions: int, region_bytes: int) -> Binding:
    """Pieces of any length and alignment that do not overlap in the target."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 3, 16, 512, 777, 4096], num_pieces).tolist()
    starts = list(accumulate(lengths, initial=0))
    assert starts[-1] < region_bytes, "the pieces must fit into a region"
    return binding_of(
        Piece(
            int(rng.integers(region_bytes - length)),
            start,
            length,
            int(rng.integers(num_regions)),
            int(rng.integers(num_regions)),
        )
        for start, length in zip(starts[:-1], lengths, strict=True)
    )


class MovingCases(Cases):
    """The right bytes in the right places, and a note after them."""

    def test_pieces_of_any_size_between_several_regions(self, crew: Crew) -> None:
        """Odd lengths, odd offsets, three regions on either side."""
        source, target = crew.source(*[MIB] * 3), crew.target(*[MIB] * 3)
        remote = source.connect(target.metadata)
        deliver(source, target, Write(remote, 1, scattered(1, 200, 3, MIB)))
        deliver(source, target, Write(remote, 2, scattered(2, 200, 3, MIB)))

    def test_one_large_piece(self, crew: Crew) -> None:
        """64 MiB at once."""
        source, target = crew.source(64 * MIB), crew.target(64 * MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, Write(remote, 1, binding_of([Piece(0, 0, 64 * MIB)])))

    def test_many_small_pieces(self, crew: Crew) -> None:
        """16,384 pieces of 512 bytes, apart on both sides."""
        source, target = crew.source(16 * MIB), crew.target(32 * MIB)
        remote = source.connect(target.metadata)
        binding = grid(16384, 512, Stride(1024, 2048))
        deliver(source, target, Write(remote, 1, binding), limit_s=60)

    def test_many_layers_in_many_regions(self, crew: Crew) -> None:
        """One set of pieces, thirty-two bases, some of them in one region."""
        source, target = crew.source(*[64 * KIB] * 32), crew.target(*[256 * KIB] * 16)
        remote = source.connect(target.metadata)
        ours = [Base(layer, 31 - layer, 128) for layer in range(32)]
        theirs = [Base(layer, layer % 16, layer // 16 * 128 * KIB) for layer in range(32)]
        binding = grid(16, 1000, Stride(2048, 4096), ours, theirs)
        deliver(source, target, Write(remote, 1, binding))

    def test_a_resharded_cache(self, crew: Crew) -> None:
        """What a plan binds for one source and two targets with larger pages, heads first."""
        tensors = (Tensor("k", DType.BFLOAT16, 64), Tensor("v", DType.BFLOAT16, 32))
        spec = CacheSpec(4, (Group("kv", Paged(), (0, 1, 2, 3), 4, tensors),))
        ours = Layout(spec, Parallel(tp=1), page_tokens=16)
        theirs = Layout(spec, Parallel(tp=2), page_tokens=64, order=Order.HND)
        plan, request = reshard(ours, theirs), Request(300, prefix=5)
        from_, into = contiguous_pools(ours, 0, 40), contiguous_pools(theirs, 0, 10)
        rng = np.random.default_rng(3)
        source = crew.source(*from_.region_bytes)
        give = Side(from_.map, {"kv": PageTable(rng.permutation(40)[:19])})
        for rank in range(2):
            target = crew.target(*into.region_bytes)
            take = Side(into.map, {"kv": PageTable(rng.permutation(10)[:5])})
            binding = bind(plan, Pair(0, rank), request, give, take)
            deliver(source, target, Write(source.connect(target.metadata), rank, binding))

    def test_a_later_write_wins(self, crew: Crew) -> None:
        """Writes that follow each other's end leave the last bytes."""
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        for op in range(8):
            piece = Piece(op * 100 * KIB, 5, 100 * KIB)
            deliver(source, target, Write(remote, op, binding_of([piece])))

    def test_many_writes_in_flight_to_several_peers(self, crew: Crew) -> None:
        """64 writes, submitted at once and in turn, each told once."""
        source, targets = crew.source(4 * MIB), [crew.target(4 * MIB) for _ in range(2)]
        remotes = [source.connect(target.metadata) for target in targets]
        writes = []
        for op in range(64):
            which, at = op % 2, op // 2 * 128 * KIB
            pieces = [Piece(op * 60 * KIB + i * 5000, at + i * 8000, 3000) for i in range(12)]
            note = f"note {op}".encode()
            writes.append(Write(remotes[which], op, binding_of(pieces), note))
        source.write(*writes)
        all_well(source.wait(num_ended=64).ended, writes)
        for which, target in enumerate(targets):
            theirs = writes[which::2]
            for write in theirs:
                target.regions = after(write.binding, source.regions, target.regions)
            target.check()
            notes = [write.note for write in theirs] if self.kind.carries_notes else []
            arrivals = target.wait(num_notes=len(notes)).arrivals
            assert sorted(arrival.note for arrival in arrivals) == sorted(notes)

    def test_a_note_comes_after_its_data(self, crew: Crew) -> None:
        """When a note is polled, its bytes are there. Who carries none is never heard to."""
        source, target = crew.source(16 * MIB), crew.target(4 * MIB)
        remote = source.connect(target.metadata)
        for op in range(8):
            binding = grid(1024, 3 * KIB, Stride(4 * KIB + op, 4 * KIB))
            note = f"note {op}".encode()
            write = Write(remote, op, binding, note)
            source.write(write)
            target.regions = after(binding, source.regions, target.regions)
            if self.kind.carries_notes:
                (arrival,) = target.wait(num_notes=1).arrivals
                assert arrival == (note, (checksum(target.regions[0]),))
            all_well(source.wait(num_ended=1).ended, [write])
            target.check()
        assert not target.wait(limit_s=0.1).arrivals

    @pytest.mark.parametrize("note", [b"", b"\0", bytes(range(256)), bytes(range(256)) * 1024])
    def test_notes_of_any_bytes(self, crew: Crew, note: bytes) -> None:
        """Empty, binary and a quarter of a MiB long."""
        source, target = crew.source(KIB), crew.target(KIB)
        remote = source.connect(target.metadata)
        deliver(source, target, Write(remote, 7, binding_of([Piece(0, 0, KIB)]), note))
        notes = [note] if self.kind.carries_notes else []
        arrivals = target.wait(num_notes=len(notes)).arrivals
        assert [arrival.note for arrival in arrivals] == notes
