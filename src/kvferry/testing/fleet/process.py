"""A rank's process as the fleet sees it: asked over a pipe, stopped and killed by signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from kvferry.errors import KvferryError
from kvferry.testing.fleet.worker import RankSpec, serve

ANSWER_S = 60.0
END_S = 10.0


class RankError(KvferryError):
    """A rank answered with an error, or not at all."""


@cache
def _server() -> ForkServerContext:
    """Where processes come from: one that has everything loaded, and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.testing.fleet.preload"])
    return context


class RankProcess:
    """One rank's process. ``begin`` and ``answer`` let several ranks work at once."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self._pipe, theirs = _server().Pipe()
        # A daemon, so that a test which dies leaves nothing behind.
        self.process: BaseProcess = _server().Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.begin("start", spec)

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    # ------------------------------------------------------------ questions

    def begin(self, method: str, *args: Any) -> None:
        """Ask for something. Whether the rank is gone is told by ``answer``."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send((method, args))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer to the oldest question."""
        try:
            if not self._pipe.poll(timeout_s):
                raise RankError(f"{self} gave no answer in {timeout_s} s")
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RankError(f"{self} is gone") from None
        if not good:
            raise RankError(f"{self}: {value}")
        return value

    def ask(self, method: str, *args: Any) -> Any:
        """Ask and wait."""
        self.begin(method, *args)
        return self.answer()

    # ------------------------------------------------------------ life and death

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        give_up = time.monotonic() + ANSWER_S
        while self._state() != "T":
            if time.monotonic() > give_up:
                raise RankError(f"{self} does not stop")
            time.sleep(0.001)

    def _state(self) -> str:
        """As Linux tells it; other systems are taken at their word."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
                return file.read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "T"

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def hang_up(self) -> None:
        """Let it end by itself, even if it stands still."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            self.resume()

    def end(self) -> None:
        """Hang up, and make sure that it ends."""
        self.hang_up()
        self.process.join(END_S)
        self.kill()

    def __repr__(self) -> str:
        return f"<{self.spec.role} {self.spec.name}/{self.spec.rank} pid {self.process.pid}>"
