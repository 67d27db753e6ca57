"""Processes of the conformance suite as tests see them: start, ask, stop, kill.

Every question has a time limit. A process that does not answer is asked where it
is, and that, with all that it has printed, is what the failing test shows.
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
    """A process died or does not answer; the message says where and what it printed."""


class TransportKind(NamedTuple):
    """Which transport, and how it is set up."""

    transport: str
    options: Mapping[str, str]
    environment: Mapping[str, str]
    device: str = "cpu"


class PeerProcess:
    """One transport in another process: each method asks for it and waits.

    ``regions`` is what its memory must hold, kept up to date by whoever writes to it.
    """

    def __init__(self, process: Process, connection: Connection) -> None:
        self.process = process
        self.metadata = b""
        self.regions: list[Bytes] = []
        self._margin = 0
        self._connection = connection
        self._asked = ""
        # Why nothing more can be asked: its next answer would belong to an earlier question.
        self._lost = ""

    def open_target(self, sizes: Sequence[int], margin: int = 0) -> None:
        """Let peers write regions of these sizes, with untouchable margins around each."""
        options = self.process.kind.options
        self.metadata = self.call("open_target", _agent(), options, sizes, margin)
        self.regions, self._margin = [np.zeros(size, dtype=np.uint8) for size in sizes], margin

    def open_source(self, sizes: Sequence[int]) -> None:
        """Have regions of these sizes that nobody else writes."""
        options = self.process.kind.options
        self.metadata = self.call("open_source", _agent(), options, sizes)
        self.regions, self._margin = [np.zeros(size, dtype=np.uint8) for size in sizes], 0

    def realm(self) -> str:
        """The transport's realm."""
        return cast("str", self.call("realm"))

    def fill(self, seed: int) -> None:
        """Give every region a pattern: that of ``seed``, of ``seed + 1``, and so on."""
        self.call("fill", seed)
        self.regions = [pattern(seed + i, old.nbytes) for i, old in enumerate(self.regions)]

    def check(self) -> None:
        """Every byte is what ``regions`` says, and the margins are untouched."""
        for index, (read, expected) in enumerate(zip(self.call("read"), self.regions, strict=True)):
            _alike(read, np.pad(expected, self._margin), f"region {index}", -self._margin)

    def check_part(self, region: int, offset: int, length: int) -> None:
        """These bytes of a region are what ``regions`` says."""
        expected = self.regions[region][offset : offset + length]
        _alike(self.peek(region, offset, length), expected, f"region {region}", offset)

    def peek(self, region: int, offset: int, length: int) -> bytes:
        """A few bytes of a region."""
        return cast("bytes", self.call("peek", region, offset, length))

    def connect(self, metadata: bytes) -> int:
        """Connect to whoever has that metadata; the number that writes name."""
        return cast("int", self.call("connect", metadata))

    def disconnect(self, remote: int) -> None:
        """Forget a peer."""
        self.call("disconnect", remote)

    def write(self, *writes: HostWrite) -> None:
        """Start these writes."""
        self.call("write", writes)

    def write_now(
        self, *shares: Sequence[HostWrite], meanwhile: Sequence[HostWrite] = ()
    ) -> list[WriteEnded]:
        """Make these writes at once, each share on a thread of its own; how they ended.

        ``meanwhile`` others are started on the transport's own thread; ``wait`` for those.
        """
        return cast("list[WriteEnded]", self.call("write_now", shares, meanwhile))

    def wait(self, num_ended: int, limit_s: float = 30.0) -> list[WriteEnded]:
        """What has ended and was not told yet, once it is that much or the time is up."""
        told = self.call("wait", num_ended, limit_s, limit_s=limit_s + ANSWER_S)
        return cast("list[WriteEnded]", told)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """It answers, and does not poll."""
        self.call("rest", True)
        yield
        self.call("rest", False)

    def close(self, limit_s: float = ANSWER_S) -> list[WriteEnded]:
        """End the transport; what was polled before and not asked for."""
        return cast("list[WriteEnded]", self.call("close", limit_s=limit_s))

    # ------------------------------------------------------------ questions and answers

    def call(self, name: str, *arguments: Any, limit_s: float = ANSWER_S) -> Any:
        """Ask and wait for the answer."""
        self.ask(name, *arguments)
        return self.answer(limit_s)

    def ask(self, name: str, *arguments: Any) -> None:
        """Ask only, so that others can be asked meanwhile."""
        if self._lost:
            raise ProcessBroken(f"{name} was not asked, because {self._lost}")
        self._asked = name
        try:
            self._connection.send((name, arguments))
        except OSError:
            raise ProcessBroken(self.process.story(f"it could not be asked to {name}")) from None

    def answer(self, limit_s: float = ANSWER_S) -> Any:
        """The answer to what was asked last. Raises ``TransportError`` if that is the answer."""
        try:
            if not self._connection.poll(limit_s):
                self._lost = f"{self._asked} took longer than {limit_s} s"
                raise ProcessBroken(self.process.story(self._lost, dump=True))
            good, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise ProcessBroken(self.process.story(f"it ended during {self._asked}")) from None
        if not good:
            raise TransportError(value)
        return value

    def hang_up(self) -> None:
        """Ask nothing more."""
        self._connection.close()


class Process:
    """A process with one or more peers in it, each in its own thread."""

    def __init__(self, kind: TransportKind, num_peers: int = 1) -> None:
        self.kind = kind
        self._ended = False
        self._killed = False
        self._printed, path = tempfile.mkstemp()
        os.unlink(path)  # The descriptor is enough.
        pairs = [socket.socketpair() for _ in range(num_peers)]
        theirs = [pair[1].fileno() for pair in pairs]
        module = __package__ or ""
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module, kind.transport, kind.device, *map(str, theirs)],
            pass_fds=theirs,
            env={**os.environ, **kind.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
        )
        for _, their in pairs:
            their.close()
        self.peers = [PeerProcess(self, Connection(ours.detach())) for ours, _ in pairs]

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._popen.poll() is None

    @property
    def dismissed(self) -> bool:
        """Whether it was killed or ended by us, and not by itself."""
        return self._killed or self._ended

    def kill(self) -> None:
        """``kill -9``, and wait for the end."""
        self._killed = True
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has taken effect."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitpid(self._popen.pid, os.WUNTRACED)

    def resume(self) -> None:
        """SIGCONT."""
        self._popen.send_signal(signal.SIGCONT)

    def end(self, limit_s: float = 10.0) -> int:
        """Let it end by itself, or else kill it; its exit status."""
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

    def story(self, what: str, *, dump: bool = False) -> str:
        """What went wrong, how the process is, and what it has printed."""
        if dump and self.alive:
            self.resume()
            self._popen.send_signal(signal.SIGUSR1)
            time.sleep(0.5)  # It writes its stacks without telling when it has.
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(5)
        printed = os.pread(self._printed, 1 << 20, 0).decode(errors="replace")[-8000:]
        state = "runs" if self.alive else f"has exit status {self._popen.returncode}"
        return f"process {self._popen.pid}: {what}; it {state} and has printed:\n{printed}"


def _alike(found: bytes, expected: Bytes, what: str, start: int) -> None:
    """Compare without showing both: pytest's own diff of a MiB takes minutes where CI is set."""
    wrong = np.flatnonzero(np.frombuffer(found, dtype=np.uint8) != expected)
    if len(wrong):
        first = wrong[0] + start
        raise AssertionError(f"{what} has {len(wrong)} wrong bytes, the first at {first}")


def _agent() -> str:
    return f"suite-{os.getpid()}-{next(_serial)}"
