"""Cases about a transport's own life: several at once, and the end with work under way."""

from __future__ import annotations

from kvferry.plan.coalesce import Stride
from kvferry.testing.transports.base import Cases
from kvferry.testing.transports.bindings import PlacedPiece, after, binding_of, grid
from kvferry.testing.transports.crew import MARGIN, Crew, all_well, deliver
from kvferry.testing.transports.host import HostWrite

KIB, MIB = 1 << 10, 1 << 20
WHOLE = binding_of([PlacedPiece(0, 0, MIB)])
LARGE = grid(128, 64 * KIB - 1, Stride(64 * KIB, 64 * KIB))


class LivingCases(Cases):
    """Transports do not disturb each other, and always let go."""

    def test_two_transports_in_two_threads(self, crew: Crew) -> None:
        """Both write and are written to, into each other and into another process."""
        pair, third = crew.process(num_peers=2), crew.target(4 * MIB, 4 * MIB)
        asked: list[list[HostWrite]] = []
        for seed, peer in enumerate(pair.peers):
            peer.open_target([4 * MIB, 4 * MIB], MARGIN)
            peer.fill(seed=10 * seed)
        for index, peer in enumerate(pair.peers):
            near = peer.connect(pair.peers[1 - index].metadata)
            far = peer.connect(third.metadata)
            writes = []
            for op in range(32):
                # Read from region 0, which nobody writes; the third has a region for each.
                piece = PlacedPiece(op * 100 * KIB, op * 128 * KIB, 100 * KIB, 0, 1)
                writes.append(HostWrite(near, 2 * op, binding_of([piece])))
                piece = piece._replace(target_region=index)
                writes.append(HostWrite(far, 2 * op + 1, binding_of([piece])))
            peer.ask("write", writes)
            asked.append(writes)
            for write in writes:
                into = third if write.op % 2 else pair.peers[1 - index]
                into.regions = after(write.binding, peer.regions, into.regions)
        for peer in pair.peers:
            peer.answer()
        for peer, writes in zip(pair.peers, asked, strict=True):
            all_well(peer.wait(num_ended=64), writes)
        for peer in (*pair.peers, third):
            peer.check()

    def test_close_with_writes_in_flight(self, crew: Crew) -> None:
        """It returns, the process lives on, and the target serves the next source."""
        source, target = crew.source(8 * MIB), crew.target(8 * MIB)
        remote = source.connect(target.metadata)
        source.write(*(HostWrite(remote, op, LARGE) for op in range(16)))
        source.close(limit_s=20)
        source.open_source([MIB])
        source.fill(77)
        target.close()
        target.open_target([MIB])
        deliver(source, target, HostWrite(source.connect(target.metadata), 1, WHOLE))

    def test_close_while_the_target_is_stopped(self, crew: Crew) -> None:
        """It returns without the target's help."""
        source, target = crew.source(MIB), crew.target(MIB)
        remote = source.connect(target.metadata)
        deliver(source, target, HostWrite(remote, 1, binding_of([PlacedPiece(0, 0, KIB)])))
        target.process.stop()
        source.write(HostWrite(remote, 2, WHOLE))
        source.close(limit_s=20)
        target.process.resume()
        assert target.peek(0, 0, 1) == target.regions[0][:1].tobytes()

    def test_the_target_closes_while_it_is_written(self, crew: Crew) -> None:
        """The source's writes end in one way or another, and both processes live on."""
        source, target = crew.source(8 * MIB), crew.target(8 * MIB)
        remote = source.connect(target.metadata)
        source.ask("write", [HostWrite(remote, op, LARGE) for op in range(16)])
        target.close(limit_s=20)
        source.answer(self.patience_s)
        ended = source.wait(num_ended=16, limit_s=self.patience_s)
        assert sorted(one.op for one in ended) == list(range(16)), "one end each"

    def test_a_source_that_ends_takes_nothing_with_it(self, crew: Crew) -> None:
        """The next source reaches the same target by the same metadata."""
        target = crew.target(MIB)
        for _ in range(2):
            source = crew.source(MIB)
            deliver(source, target, HostWrite(source.connect(target.metadata), 1, WHOLE))
            assert source.process.end() == 0

    def test_close_without_having_done_anything(self, crew: Crew) -> None:
        """Also with a peer connected. (Every close of this suite is done twice.)"""
        source, target = crew.source(KIB), crew.target(KIB)
        source.connect(target.metadata)
        assert source.close() == []
        assert target.close() == []
