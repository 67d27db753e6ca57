"""Processes of the conformance suite, as tests use them: start, ask, stop, kill.

Every request has a time limit. A process that does not answer prints its stacks, and the failing
test shows them with everything else that the process has printed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np

from kvferry.errors import TransportError
from kvferry.testing.transports.bindings import Bytes, pattern
from kvferry.testing.transports.host import HostWrite
from kvferry.transports.base import WriteEnded

ANSWER_S = 60.0
_serial = itertools.count()


class ProcessBroken(AssertionError):
    """A process died or does not answer; the message has what it printed."""


class TransportKind(NamedTuple):
    """The transport to test, and its setup."""

    transport: str
    options: Mapping[str, str]
    environment: Mapping[str, str]
    device: str = "cpu"


class PeerProcess:
    """One transport in another process. Its methods send a request and wait for the reply.

    ``regions`` is what its memory must hold; tests update it when they write.
    """

    def __init__(self, process: Process, connection: Connection) -> None:
        self.process = process
        self.metadata = b""
        self.regions: list[Bytes] = []
        self._margin = 0
        self._connection = connection
        self._asked = ""
        # Why nothing more can be asked: the next reply would belong to an earlier request.
        self._lost = ""

    def open_target(self, sizes: Sequence[int], margin: int = 0) -> None:
        """Open regions that peers may write, with margins that nobody may write."""
        self._open(sizes, margin, writable=True)

    def open_source(self, sizes: Sequence[int]) -> None:
        """Open regions that no peer writes."""
        self._open(sizes, 0, writable=False)

    def _open(self, sizes: Sequence[int], margin: int, *, writable: bool) -> None:
        agent, options = f"suite-{os.getpid()}-{next(_serial)}", self.process.kind.options
        self.metadata = self.call("open", agent, options, sizes, margin, writable)
        self.regions, self._margin = [np.zeros(size, dtype=np.uint8) for size in sizes], margin

    def realm(self) -> str:
        """Return the transport's realm."""
        return cast("str", self.call("realm"))

    def fill(self, seed: int) -> None:
        """Fill the regions with the patterns of ``seed``, ``seed + 1`` and so on."""
        self.call("fill", seed)
        self.regions = [pattern(seed + i, old.nbytes) for i, old in enumerate(self.regions)]

    def check(self) -> None:
        """Check every byte against ``regions``, and that the margins are untouched."""
        for index, (read, expected) in enumerate(zip(self.call("read"), self.regions, strict=True)):
            _compare(read, np.pad(expected, self._margin), f"region {index}", -self._margin)

    def check_part(self, region: int, offset: int, length: int) -> None:
        """Check some bytes of a region against ``regions``."""
        expected = self.regions[region][offset : offset + length]
        _compare(self.peek(region, offset, length), expected, f"region {region}", offset)

    def peek(self, region: int, offset: int, length: int) -> bytes:
        """Return some bytes of a region."""
        return cast("bytes", self.call("peek", region, offset, length))

    def connect(self, metadata: bytes) -> int:
        """Connect to the peer with that metadata; return the connection's number."""
        return cast("int", self.call("connect", metadata))

    def disconnect(self, remote: int) -> None:
        """Disconnect from a peer."""
        self.call("disconnect", remote)

    def write(self, *writes: HostWrite) -> None:
        """Submit these writes."""
        self.call("write", writes)

    def write_now(
        self, *shares: Sequence[HostWrite], meanwhile: Sequence[HostWrite] = ()
    ) -> list[WriteEnded]:
        """Make immediate writes, each share on a thread of its own; return those that ended.

        The transport's own thread submits the writes ``meanwhile``; ``wait`` returns their ends.
        """
        return cast("list[WriteEnded]", self.call("write_now", shares, meanwhile))

    def wait(self, num_ended: int, limit_s: float = 30.0) -> list[WriteEnded]:
        """Wait until that many writes have ended or the time is up; return those that ended."""
        ended = self.call("wait", num_ended, limit_s, limit_s=limit_s + ANSWER_S)
        return cast("list[WriteEnded]", ended)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Let the peer serve requests without polling."""
        self.call("rest", True)
        yield
        self.call("rest", False)

    def close(self, limit_s: float = ANSWER_S) -> list[WriteEnded]:
        """Close the transport; return the ended writes that nobody waited for."""
        return cast("list[WriteEnded]", self.call("close", limit_s=limit_s))

    # ------------------------------------------------------------ requests

    def call(self, name: str, *arguments: Any, limit_s: float = ANSWER_S) -> Any:
        """Send a request and wait for the reply."""
        self.ask(name, *arguments)
        return self.answer(limit_s)

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a request without waiting for the reply."""
        if self._lost:
            raise ProcessBroken(f"{name} was not asked, because {self._lost}")
        self._asked = name
        try:
            self._connection.send((name, arguments))
        except OSError:
            raise ProcessBroken(self.process.describe(f"it could not be asked to {name}")) from None

    def answer(self, limit_s: float = ANSWER_S) -> Any:
        """Return the reply to the last request. Raises ``TransportError`` if that is the reply."""
        try:
            if not self._connection.poll(limit_s):
                self._lost = f"{self._asked} took longer than {limit_s} s"
                raise ProcessBroken(self.process.describe(self._lost, dump=True))
            good, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise ProcessBroken(self.process.describe(f"it ended during {self._asked}")) from None
        if not good:
            raise TransportError(value)
        return value

    def hang_up(self) -> None:
        """Close the connection."""
        self._connection.close()


class Process:
    """A process with one or more peers, each on its own thread."""

    def __init__(self, kind: TransportKind, num_peers: int = 1) -> None:
        self.kind = kind
        self._ended = False
        self._killed = False
        self._printed, path = tempfile.mkstemp()
        os.unlink(path)  # The descriptor is enough.
        pairs = [socket.socketpair() for _ in range(num_peers)]
        child_fds = [pair[1].fileno() for pair in pairs]
        module = __package__ or ""
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module, kind.transport, kind.device, *map(str, child_fds)],
            pass_fds=child_fds,
            env={**os.environ, **kind.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
        )
        for _, child in pairs:
            child.close()
        self.peers = [PeerProcess(self, Connection(own.detach())) for own, _ in pairs]

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._popen.poll() is None

    @property
    def dismissed(self) -> bool:
        """Whether the test has killed or ended it."""
        return self._killed or self._ended

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._killed = True
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitpid(self._popen.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._popen.send_signal(signal.SIGCONT)

    def end(self, limit_s: float = 10.0) -> int:
        """Let the process end, or kill it after the time limit; return its exit status."""
        if self._ended:
            return self._popen.returncode
        self._ended = True
        for peer in self.peers:
            peer.hang_up()
        self.resume()
        try:
            return self._popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._popen.returncode
        finally:
            os.close(self._printed)

    def describe(self, what: str, *, dump: bool = False) -> str:
        """Return what went wrong, the process's state and its output, with stacks if asked for."""
        if dump and self.alive:
            self.resume()
            self._popen.send_signal(signal.SIGUSR1)
            time.sleep(0.5)  # Nothing tells when the stacks are written.
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(5)
        printed = os.pread(self._printed, 1 << 20, 0).decode(errors="replace")[-8000:]
        state = "runs" if self.alive else f"has exit status {self._popen.returncode}"
        return f"process {self._popen.pid}: {what}; it {state} and has printed:\n{printed}"


def _compare(found: bytes, expected: Bytes, what: str, start: int) -> None:
    """Compare without pytest's own diff, which takes minutes for a MiB where CI is set."""
    wrong = np.flatnonzero(np.frombuffer(found, dtype=np.uint8) != expected)
    if len(wrong):
        first = wrong[0] + start
        raise AssertionError(f"{what} has {len(wrong)} wrong bytes, the first at {first}")
