"""The thread that carries writes to Mooncake and watches over them.

Mooncake's calls that await a write's end spin on a core, and give up after 30 seconds
without knowing it. So each piece is submitted by itself, a bounded number at a time for
each peer, and looked after until Mooncake says how it ended: that costs no more than
its batches do. One thread does this for all peers, and never waits for any of them.

Only the very first contact with a peer can't be made without waiting for it. A thread
of its own makes that, and the peer's writes wait until it has. (While Mooncake meets a
peer it lets nobody else submit. So the peer is asked first whether it answers at all;
only one that stops within that millisecond could hold others up.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kvferry.ids import Op
from kvferry.protocol.events import WriteFate
from kvferry.transports.base import WriteEnded
from kvferry.transports.mailbox import Mailbox

# Mooncake queues 1024 pieces for a peer, and whoever exceeds that breaks the connection.
# More than a few dozen gain nothing.
_WINDOW = 256
# How long to rest when nothing moves: short at first, longer the longer that lasts.
_SHORTEST_S, _LONGEST_S = 50e-6, 2e-3

# How long to wait for a peer to answer before its writes must wait by themselves.
_MEETING_S = 0.1
# How long to wait for the courier's end, should it be held up.
_PATIENCE_S = 5.0

_UNDER_WAY, _DONE, _TIMED_OUT = 0, 1, -2


class MooncakePiece(NamedTuple):
    """From where, to where, how much."""

    source: int
    target: int
    length: int


class CourierWrite:
    """A write: pieces to submit, and how many are under way."""

    def __init__(self, op: Op, pieces: list[MooncakePiece]) -> None:
        self.op = op
        self.pieces = pieces[::-1]
        self.num_under_way = 0
        self.problem = ""
        # A piece has failed, so its bytes may still be on their way.
        self.in_doubt = False
        self.is_told = False

    def give_up(self, problem: str) -> None:
        """Submit no more of it."""
        self.pieces.clear()
        self.problem = self.problem or problem

    @property
    def is_over(self) -> bool:
        """Whether Mooncake has nothing more of it to do."""
        return not (self.pieces or self.num_under_way)


class PeerQueue:
    """One peer, by the name that Mooncake knows it by."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = False
        self.is_left = False
        # Why nothing more is submitted.
        self.refusal = ""
        self.jobs: deque[CourierWrite] = deque()
        # In the order of submission, in which they roughly end.
        self.under_way: deque[tuple[int, CourierWrite]] = deque()


class Courier:
    """Its thread owns all lanes. Others only put commands into its inbox."""

    def __init__(self, engine: Any, tell: Callable[[WriteEnded], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._inbox: Mailbox[Callable[[], None]] = Mailbox()
        self._lanes: list[PeerQueue] = []
        self._stopped = False
        self._meetings: list[threading.Thread] = []
        self._thread = _thread("kvferry-mooncake", self._run)

    # ------------------------------------------------------------ from the transport's thread

    def open(self, lane: PeerQueue) -> None:
        """Make the first contact, in a thread of its own. Usually it is made on return."""
        self._inbox.put(partial(self._lanes.append, lane))
        meeting = _thread("kvferry-mooncake-meet", partial(self._meet, lane))
        meeting.join(_MEETING_S)
        self._meetings = [one for one in (*self._meetings, meeting) if one.is_alive()]

    def submit(self, lane: PeerQueue, job: CourierWrite) -> None:
        """Carry a write."""
        self._inbox.put(partial(self._accept, lane, job))

    def leave(self, lane: PeerQueue) -> None:
        """Tell at once what is known of its writes, and nothing later."""
        self._inbox.put(partial(self._abandon, lane))

    def stop(self) -> bool:
        """Submit nothing more, and end; whether nobody uses the engine any more."""
        self._inbox.put(self._stop)
        self._thread.join(_PATIENCE_S)
        return not any(one.is_alive() for one in (self._thread, *self._meetings))

    def _meet(self, lane: PeerQueue) -> None:
        code = self._engine.send_probe(lane.name)
        if code:
            refusal = f"{lane.name} can't be reached (Mooncake says {code})"
        else:
            refusal = ""
            # A piece of nothing is over at once, but Mooncake has met the peer for it.
            number = self._engine.transfer_submit_write(lane.name, 0, 0, 0)
            if number:
                self._engine.transfer_check_status(number)
        self._inbox.put(partial(self._opened, lane, refusal))

    # ------------------------------------------------------------ in the courier's thread

    def _run(self) -> None:
        """Work while there is any, and wait for more."""
        rest_s = _SHORTEST_S
        while not self._stopped:
            self._take(rest_s)
            moved = [self._move(lane) for lane in list(self._lanes)]
            rest_s = _SHORTEST_S if any(moved) else min(2 * rest_s, _LONGEST_S)

    def _take(self, rest_s: float) -> None:
        """Obey every command that has come. Without work under way, wait for one."""
        busy = any(lane.under_way for lane in self._lanes)
        for command in self._inbox.drain(rest_s if busy else None):
            command()

    def _stop(self) -> None:
        self._stopped = True

    def _opened(self, lane: PeerQueue, refusal: str) -> None:
        lane.is_open, lane.refusal = True, lane.refusal or refusal

    def _accept(self, lane: PeerQueue, job: CourierWrite) -> None:
        lane.jobs.append(job)

    def _abandon(self, lane: PeerQueue) -> None:
        lane.is_left, lane.refusal = True, lane.refusal or "disconnected"
        for _, job in lane.under_way:
            self._end(job, WriteFate.UNKNOWN, "disconnected while under way")

    def _move(self, lane: PeerQueue) -> bool:
        """Look after a peer's pieces and submit more; whether anything happened."""
        moved = self._look(lane)
        if lane.is_open and not lane.refusal:
            moved = self._fill(lane) or moved
        if lane.refusal:
            self._refuse(lane)
        if lane.is_left and not lane.under_way:
            self._lanes.remove(lane)
        return moved

    def _fill(self, lane: PeerQueue) -> bool:
        """Submit what the window allows."""
        moved = False
        while lane.jobs and not lane.refusal and len(lane.under_way) < _WINDOW:
            job = lane.jobs[0]
            if job.pieces:
                self._submit(lane, job)
            if not job.pieces:
                lane.jobs.popleft()
                self._finish(job)
            moved = True
        return moved

    def _submit(self, lane: PeerQueue, job: CourierWrite) -> None:
        number = self._engine.transfer_submit_write(lane.name, *job.pieces.pop())
        if number:
            lane.under_way.append((number, job))
            job.num_under_way += 1
        else:
            lane.refusal = f"Mooncake takes no pieces for {lane.name}"
            job.give_up(lane.refusal)

    def _look(self, lane: PeerQueue) -> bool:
        """Which pieces have ended, from the oldest to the first that has not."""
        moved = False
        while lane.under_way:
            number, job = lane.under_way[0]
            code = self._engine.transfer_check_status(number)
            if code in (_UNDER_WAY, _TIMED_OUT):  # A timeout is an opinion, not an end.
                break
            lane.under_way.popleft()
            job.num_under_way -= 1
            if code != _DONE:
                job.in_doubt = True
                job.give_up(f"Mooncake says {code} of a piece for {lane.name}")
                lane.refusal = lane.refusal or f"an earlier write to {lane.name} failed"
            self._finish(job)
            moved = True
        return moved

    def _refuse(self, lane: PeerQueue) -> None:
        """Submit nothing more of any write. One that has begun ends when its pieces have."""
        while lane.jobs:
            job = lane.jobs.popleft()
            job.give_up(lane.refusal)
            self._finish(job)

    def _finish(self, job: CourierWrite) -> None:
        """End a write when none of its pieces is under way.

        Then our memory is read no more, for Mooncake tells of a failure only after that.
        But the peer may still take what a failed piece has left on its way, from the
        buffers of its own host, as long as its process lives.
        """
        if job.is_over:
            failed = WriteFate.UNKNOWN if job.in_doubt else WriteFate.FAILED
            self._end(job, failed if job.problem else None, job.problem)

    def _end(self, job: CourierWrite, fate: WriteFate | None, detail: str) -> None:
        """Tell of a write, once."""
        if not job.is_told:
            job.is_told = True
            self._tell(WriteEnded(job.op, fate, detail))


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
