"""Channel for look-ups of prefixes, from the lead rank's process to the scheduler's.

Another instance asks the lead rank, but only the scheduler's thread may use vLLM's block pool, and
it may sleep until a request comes. The scheduler's side listens on a Unix socket, whose address the
ranks get with a step's metadata: before the first step nothing is cached. It queues a look-up,
wakes the engine, and returns the answer that the next step gives. The socket has a name in Linux's
abstract namespace, so no file is left behind, and answers processes of the same user only.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from kvferry import PrefixQuery, Room

log = logging.getLogger("vllm.kvferry")

# A short chain has 1 MiB at most.
MAX_BYTES = 2 << 20
# How long to wait for a question that a process of the same user has begun.
READ_S = 5.0
_CREDENTIALS = struct.Struct("3i")


class LookupQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A ``PrefixQuery`` for another process. Nobody waits for the answer after ``deadline_s``."""

    room: Room
    chain: bytes
    prefix: int
    deadline_s: float


class LookupClient:
    """Asks the scheduler at ``address``, once that is known."""

    def __init__(self) -> None:
        self.address: str | None = None

    def holds(self, query: PrefixQuery) -> int:
        """Return how many tokens the scheduler has pinned; 0 if it does not answer in time.

        On the endpoint's look-up thread.
        """
        if self.address is None:
            return 0
        question = LookupQuestion(query.room, query.chain, query.prefix, query.deadline_s)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(question.deadline_s)
                connection.connect(self.address)
                connection.sendall(msgspec.msgpack.encode(question))
                connection.shutdown(socket.SHUT_WR)
                return msgspec.msgpack.decode(_read(connection), type=int)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("lookup-not-answered room=%r reason=%r", query.room, str(error))
            return 0


class PendingLookup(NamedTuple):
    """A look-up, and where its number of tokens is expected."""

    question: LookupQuestion
    held: Future[int]


class LookupServer:
    """Queue of look-ups for the scheduler's thread, and the thread that fills it.

    ``wake`` makes an idle engine step. The thread ends with the process.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pending: deque[PendingLookup] = deque()
        self.address = f"\0kvferry-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen()
        threading.Thread(target=self._run, name="kvferry-lookups", daemon=True).start()

    def __len__(self) -> int:
        """Return how many look-ups wait."""
        return len(self._pending)

    def take(self) -> PendingLookup | None:
        """Return a look-up that somebody waits for; None if there is none."""
        while self._pending:
            pending = self._pending.popleft()
            if pending.held.set_running_or_notify_cancel():
                return pending
        return None

    def _run(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                try:
                    self._serve(connection)
                except (OSError, msgspec.MsgspecError) as error:
                    log.warning("lookup-refused reason=%r", str(error))

    def _serve(self, connection: socket.socket) -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(peer)
        if user != os.getuid():
            return
        connection.settimeout(READ_S)
        question = msgspec.msgpack.decode(_read(connection), type=LookupQuestion)
        connection.sendall(msgspec.msgpack.encode(self._answer(question)))

    def _answer(self, question: LookupQuestion) -> int:
        pending = PendingLookup(question, Future())
        self._pending.append(pending)
        self._wake()
        try:
            return pending.held.result(question.deadline_s)
        except TimeoutError:
            # If the scheduler has begun with it already, the room fails at its deadline.
            pending.held.cancel()
            return 0


def _read(connection: socket.socket) -> bytes:
    """Return what the other side sends until it stops sending."""
    with connection.makefile("rb") as received:
        return received.read(MAX_BYTES)
