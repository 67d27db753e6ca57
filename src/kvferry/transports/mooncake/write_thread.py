"""The thread that submits writes to Mooncake and tracks them.

Mooncake's blocking calls spin on a core and give up after 30 seconds without knowing the result.
So each piece is submitted separately, a bounded number at a time for each peer, and tracked until
Mooncake reports its result. That costs no more than Mooncake's own batches. One thread does it for
all peers and never blocks on any of them.

Only the first contact with a peer blocks. A thread of its own makes it, and the peer's writes wait
until it has. Mooncake blocks all submissions while it connects to a peer, so the peer is probed
first; only a peer that stops within that millisecond can delay the others.
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

# Mooncake queues 1024 pieces per peer, and exceeding that breaks the connection. More than a few
# dozen in flight gain nothing.
_WINDOW = 256
# Backoff between status checks while nothing completes.
_MIN_PAUSE_S, _MAX_PAUSE_S = 50e-6, 2e-3
# How long ``connect`` waits for the first contact before it continues in the background.
_CONTACT_TIMEOUT_S = 0.1
# How long ``stop`` waits for the thread.
_JOIN_TIMEOUT_S = 5.0

# Mooncake's status codes.
_IN_FLIGHT, _DONE, _TIMED_OUT = 0, 1, -2


class MooncakePiece(NamedTuple):
    """One contiguous piece, by address."""

    source: int
    target: int
    length: int


class MooncakeWrite:
    """A write: the pieces to submit, and how many are in flight."""

    def __init__(self, op: Op, pieces: list[MooncakePiece]) -> None:
        self.op = op
        self.pieces = pieces[::-1]
        self.num_in_flight = 0
        self.problem = ""
        # A piece has failed, so its bytes may still be on their way.
        self.in_doubt = False
        self.is_reported = False

    def fail(self, problem: str) -> None:
        """Drop the pieces that were not submitted."""
        self.pieces.clear()
        self.problem = self.problem or problem


class PeerQueue:
    """Writes to one peer, which Mooncake knows by ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_connected = False
        self.is_disconnected = False
        # Why no more pieces are submitted.
        self.refusal = ""
        self.writes: deque[MooncakeWrite] = deque()
        # In the order of submission, which is roughly that of completion.
        self.in_flight: deque[tuple[int, MooncakeWrite]] = deque()


class MooncakeWriteThread:
    """A thread that owns all peer queues. Other threads only put commands into its mailbox."""

    def __init__(self, engine: Any, report: Callable[[WriteEnded], None]) -> None:
        self._engine = engine
        self._report = report
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._queues: list[PeerQueue] = []
        self._stopped = False
        self._contacts: list[threading.Thread] = []
        self._thread = _start_thread("kvferry-mooncake", self._run)

    # ------------------------------------------------------------ on the transport's thread

    def connect(self, queue: PeerQueue) -> None:
        """Make the first contact, in a thread of its own. Usually it is made on return."""
        self._commands.put(partial(self._queues.append, queue))
        contact = _start_thread("kvferry-mooncake-meet", partial(self._contact, queue))
        contact.join(_CONTACT_TIMEOUT_S)
        self._contacts = [one for one in (*self._contacts, contact) if one.is_alive()]

    def submit(self, queue: PeerQueue, write: MooncakeWrite) -> None:
        """Queue a write."""
        self._commands.put(partial(queue.writes.append, write))

    def disconnect(self, queue: PeerQueue) -> None:
        """Report the writes of a peer as they are now, and nothing later."""
        self._commands.put(partial(self._abandon, queue))

    def stop(self) -> bool:
        """Submit nothing more and end the thread; return whether the engine is unused now."""
        self._commands.put(self._stop)
        self._thread.join(_JOIN_TIMEOUT_S)
        return not any(one.is_alive() for one in (self._thread, *self._contacts))

    def _contact(self, queue: PeerQueue) -> None:
        code = self._engine.send_probe(queue.name)
        if code:
            refusal = f"{queue.name} cannot be reached (Mooncake's code is {code})"
        else:
            refusal = ""
            # An empty piece completes at once, but makes Mooncake connect to the peer.
            number = self._engine.transfer_submit_write(queue.name, 0, 0, 0)
            if number:
                self._engine.transfer_check_status(number)
        self._commands.put(partial(self._connected, queue, refusal))

    # ------------------------------------------------------------ on the thread itself

    def _run(self) -> None:
        pause_s = _MIN_PAUSE_S
        while not self._stopped:
            is_busy = any(queue.in_flight for queue in self._queues)
            for command in self._commands.drain(pause_s if is_busy else None):
                command()
            moved = [self._advance(queue) for queue in list(self._queues)]
            pause_s = _MIN_PAUSE_S if any(moved) else min(2 * pause_s, _MAX_PAUSE_S)

    def _stop(self) -> None:
        self._stopped = True

    def _connected(self, queue: PeerQueue, refusal: str) -> None:
        queue.is_connected, queue.refusal = True, queue.refusal or refusal

    def _abandon(self, queue: PeerQueue) -> None:
        queue.is_disconnected, queue.refusal = True, queue.refusal or "disconnected"
        for _, write in queue.in_flight:
            self._end(write, WriteFate.UNKNOWN, "disconnected while in flight")

    def _advance(self, queue: PeerQueue) -> bool:
        """Check a peer's pieces and submit more; return whether anything happened."""
        moved = self._collect(queue)
        if queue.is_connected and not queue.refusal:
            moved = self._fill_window(queue) or moved
        if queue.refusal:
            while queue.writes:
                write = queue.writes.popleft()
                write.fail(queue.refusal)
                self._end_if_over(write)
        if queue.is_disconnected and not queue.in_flight:
            self._queues.remove(queue)
        return moved

    def _fill_window(self, queue: PeerQueue) -> bool:
        moved = False
        while queue.writes and not queue.refusal and len(queue.in_flight) < _WINDOW:
            write = queue.writes[0]
            if write.pieces:
                self._submit_piece(queue, write)
            if not write.pieces:
                queue.writes.popleft()
                self._end_if_over(write)
            moved = True
        return moved

    def _submit_piece(self, queue: PeerQueue, write: MooncakeWrite) -> None:
        number = self._engine.transfer_submit_write(queue.name, *write.pieces.pop())
        if number:
            queue.in_flight.append((number, write))
            write.num_in_flight += 1
        else:
            queue.refusal = f"Mooncake refuses pieces for {queue.name}"
            write.fail(queue.refusal)

    def _collect(self, queue: PeerQueue) -> bool:
        """Take completed pieces off the front of the queue; return whether there were any."""
        moved = False
        while queue.in_flight:
            number, write = queue.in_flight[0]
            code = self._engine.transfer_check_status(number)
            if code in (_IN_FLIGHT, _TIMED_OUT):  # A timeout does not mean that it has ended.
                break
            queue.in_flight.popleft()
            write.num_in_flight -= 1
            if code != _DONE:
                write.in_doubt = True
                write.fail(f"a piece for {queue.name} failed (Mooncake's code is {code})")
                queue.refusal = queue.refusal or f"an earlier write to {queue.name} failed"
            self._end_if_over(write)
            moved = True
        return moved

    def _end_if_over(self, write: MooncakeWrite) -> None:
        """End a write when none of its pieces is in flight.

        Local memory is no longer read then, because Mooncake reports a failure only after that.
        But the peer may still receive what a failed piece has sent, from buffers of its own host,
        for as long as its process lives.
        """
        if write.pieces or write.num_in_flight:
            return
        failed = WriteFate.UNKNOWN if write.in_doubt else WriteFate.FAILED
        self._end(write, failed if write.problem else None, write.problem)

    def _end(self, write: MooncakeWrite, fate: WriteFate | None, detail: str) -> None:
        if not write.is_reported:
            write.is_reported = True
            self._report(WriteEnded(write.op, fate, detail))


def _start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
