"""Cases in which everything goes well: what arrives, how much at once, and when it is told."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from kvferry.layout import CacheSpec, DType, Group, Layout, Order, Paged, Parallel, Tensor
from kvferry.plan import PagedView, PageTable, RankPair, Request, bind, contiguous_pools, reshard
from kvferry.plan.bind import Binding
from kvferry.plan.coalesce import Stride
from kvferry.plan.places import Base
from kvferry.testing.transports.base import Cases
from kvferry.testing.transports.bindings import PlacedPiece, after, binding_of, grid
from kvferry.testing.transports.crew import Crew, all_well, deliver
from kvferry.testing.transports.host import HostWrite
from kvferry.testing.transports.process import PeerProcess
from kvferry.transports.base import WriteEnded

KIB, MIB = 1 << 10, 1 << 20


def scattered(seed: int, num_pieces: int, num_regions: int, region_bytes: int) -> Binding:
    """Pieces of any length and alignment that do not overlap in the target."""
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
    """Large writes, writes of many pieces and tiny ones, each into a MiB of its own."""
    shapes = [(1, MIB), (256, 3 * KIB), (1, 1)]
    writes = []
    for op in range(num_writes):
        num_rows, length = shapes[op % 3]
        base = [Base(0, 0, op * MIB)]
        binding = grid(num_rows, length, Stride(4 * KIB, 4 * KIB), base, base)
        writes.append(HostWrite(remote, op, binding))
    return writes


def all_there(target: PeerProcess, ended: list[WriteEnded]) -> None:
    """The stripes whose end was told are in the target's memory by now."""
    for one in ended:
        target.check_part(0, one.op * MIB, MIB)


class MovingCases(Cases):
    """The right bytes in the right places, before their end is told."""

    def test_pieces_of_any_size_between_several_regions(self, crew: Crew) -> None:
        """Odd lengths, odd offsets, three regions on either side."""
        source, target = crew.source(*[MIB] * 3), crew.target(*[MIB] * 3)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, scattered(1, 200, 3, MIB)))
        deliver(source, target, HostWrite(remote, 2, scattered(2, 200, 3, MIB)))

    def test_one_large_piece(self, crew: Crew) -> None:
        """64 MiB at once."""
        source, target = crew.source(64 * MIB), crew.target(64 * MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, 64 * MIB)])))

    def test_many_small_pieces(self, crew: Crew) -> None:
        """16,384 pieces of 512 bytes, apart on both sides."""
        source, target = crew.source(16 * MIB), crew.target(32 * MIB)
        remote = source.connect(target.metadata)
        binding = grid(16384, 512, Stride(1024, 2048))
        deliver(source, target, HostWrite(remote, 1, binding), limit_s=60)

    def test_many_layers_in_many_regions(self, crew: Crew) -> None:
        """One set of pieces, thirty-two bases, some of them in one region."""
        source, target = crew.source(*[64 * KIB] * 32), crew.target(*[256 * KIB] * 16)
        remote = source.connect(target.metadata)
        ours = [Base(layer, 31 - layer, 128) for layer in range(32)]
        theirs = [Base(layer, layer % 16, layer // 16 * 128 * KIB) for layer in range(32)]
        binding = grid(16, 1000, Stride(2048, 4096), ours, theirs)
        deliver(source, target, HostWrite(remote, 1, binding))

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
        give = PagedView(from_.map, {"kv": PageTable(rng.permutation(40)[:19])})
        for rank in range(2):
            target = crew.target(*into.region_bytes)
            take = PagedView(into.map, {"kv": PageTable(rng.permutation(10)[:5])})
            binding = bind(plan, RankPair(0, rank), request, give, take)
            deliver(source, target, HostWrite(source.connect(target.metadata), rank, binding))

    def test_a_later_write_wins(self, crew: Crew) -> None:
        """Writes that follow each other's end leave the last bytes, also those made before."""
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        for op in range(16):
            piece = PlacedPiece(op % 8 * 100 * KIB, 5, 100 * KIB)
            deliver(source, target, HostWrite(remote, op, binding_of([piece])))

    def test_many_writes_in_flight_to_several_peers(self, crew: Crew) -> None:
        """64 writes, submitted at once and in turn, each told once."""
        source, targets = crew.source(4 * MIB), [crew.target(4 * MIB) for _ in range(2)]
        remotes = [source.connect(target.metadata) for target in targets]
        writes = []
        for op in range(64):
            which, at = op % 2, op // 2 * 128 * KIB
            pieces = [PlacedPiece(op * 60 * KIB + i * 5000, at + i * 8000, 3000) for i in range(12)]
            writes.append(HostWrite(remotes[which], op, binding_of(pieces)))
        source.write(*writes)
        all_well(source.wait(num_ended=64), writes)
        for which, target in enumerate(targets):
            for write in writes[which::2]:
                target.regions = after(write.binding, source.regions, target.regions)
            target.check()

    def test_what_has_ended_is_there(self, crew: Crew) -> None:
        """Of many at once, in whatever order their ends are told: each is looked for then."""
        source, target = crew.source(48 * MIB), crew.target(48 * MIB)
        writes = stripes(source.connect(target.metadata), 48)
        for write in writes:
            target.regions = after(write.binding, source.regions, target.regions)
        source.write(*writes)
        told: list[WriteEnded] = []
        while len(told) < 48:
            ended = source.wait(num_ended=1)
            assert ended, f"of 48 writes only {len(told)} have ended"
            all_there(target, ended)
            told += ended
        all_well(told, writes)
        target.check()

    def test_what_has_ended_is_there_also_if_the_target_rests(self, crew: Crew) -> None:
        """A target that does not poll may hold a write up. Then its end is not told either."""
        source, target = crew.source(24 * MIB), crew.target(24 * MIB)
        first, *writes = stripes(source.connect(target.metadata), 24)
        deliver(source, target, first)
        for write in writes:
            target.regions = after(write.binding, source.regions, target.regions)
        with target.resting():
            source.write(*writes)
            early = source.wait(num_ended=len(writes), limit_s=0.3)
            all_there(target, early)
        late = source.wait(num_ended=len(writes) - len(early))
        all_well([*early, *late], writes)
        target.check()

    def test_empty_writes(self, crew: Crew) -> None:
        """No pieces, or pieces of nothing: they end well, like those around them."""
        source, target = crew.source(KIB), crew.target(KIB)
        remote = source.connect(target.metadata)
        nothing = [[], [PlacedPiece(0, 0, 0)], [PlacedPiece(KIB, KIB, 0), PlacedPiece(5, 3, 0)]]
        bindings = [binding_of(pieces) for pieces in (*nothing, [PlacedPiece(0, 0, KIB)], *nothing)]
        deliver(source, target, *(HostWrite(remote, op, each) for op, each in enumerate(bindings)))
