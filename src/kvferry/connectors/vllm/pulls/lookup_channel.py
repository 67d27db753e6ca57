"""Channel for look-ups of prefixes, from the lead rank's process to the scheduler's.

Another instance asks the lead rank, but only the scheduler's thread may use vLLM's block pool, and
it may sleep until a request comes. The scheduler's side listens on a Unix socket, whose address the
ranks get with a step's metadata: before the first step nothing is cached. It queues a look-up,
wakes the engine, and returns the answer that the next step gives. Names are in Linux's abstract
namespace, so no file is left behind, and a connection must prove that it knows the secret.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import NamedTuple

import msgspec

from kvferry import PrefixQuery, Room

log = logging.getLogger("vllm.kvferry")

SECRET_BYTES = 32


class LookupAddress(NamedTuple):
    """A scheduler's socket, and the secret that a connection must know."""

    name: str
    secret: bytes


class LookupQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A ``PrefixQuery`` for another process. Nobody waits for the answer after ``deadline_s``."""

    room: Room
    chain: bytes
    prefix: int
    deadline_s: float


class LookupClient:
    """Asks the scheduler at ``address``, once that is known."""

    def __init__(self) -> None:
        self.address: LookupAddress | None = None

    def holds(self, query: PrefixQuery) -> int:
        """Return how many tokens the scheduler has pinned; 0 if it does not answer in time.

        On the endpoint's look-up thread.
        """
        if self.address is None:
            return 0
        question = LookupQuestion(query.room, query.chain, query.prefix, query.deadline_s)
        try:
            with Client(self.address.name, "AF_UNIX", authkey=self.address.secret) as connection:
                connection.send_bytes(msgspec.msgpack.encode(question))
                if connection.poll(question.deadline_s):
                    return msgspec.msgpack.decode(connection.recv_bytes(), type=int)
        except (OSError, EOFError, AuthenticationError, msgspec.MsgspecError) as error:
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
        name = f"\0kvferry-{secrets.token_hex(16)}"
        self.address = LookupAddress(name, secrets.token_bytes(SECRET_BYTES))
        self._listener = Listener(name, "AF_UNIX", authkey=self.address.secret)
        threading.Thread(target=self._run, name="kvferry-lookups", daemon=True).start()

    def __bool__(self) -> bool:
        """Whether look-ups wait."""
        return bool(self._pending)

    def take(self) -> PendingLookup | None:
        """Return a look-up that somebody waits for; None if there is none."""
        while self._pending:
            pending = self._pending.popleft()
            if pending.held.set_running_or_notify_cancel():
                return pending
        return None

    def _run(self) -> None:
        while True:
            try:
                with self._listener.accept() as connection:
                    question = msgspec.msgpack.decode(connection.recv_bytes(), type=LookupQuestion)
                    connection.send_bytes(msgspec.msgpack.encode(self._answer(question)))
            except (ConnectionError, EOFError, AuthenticationError, msgspec.MsgspecError):
                continue

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
