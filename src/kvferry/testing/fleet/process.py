"""A rank's process, as the fleet uses it: requests over a pipe, signals to stop and kill it."""

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
    """A rank answered with an error, or did not answer."""


@cache
def _server() -> ForkServerContext:
    """Return the server that forks the processes: it has every import and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.testing.fleet.preload"])
    return context


class RankProcess:
    """One rank's process. With ``begin`` and ``answer``, several ranks work at once."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self._pipe, child_end = _server().Pipe()
        # A daemon process ends with the test, however the test ends.
        self.process: BaseProcess = _server().Process(target=serve, args=(child_end,), daemon=True)
        self.process.start()
        child_end.close()
        self.begin("start", spec)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self.process.pid is not None
        return self.process.pid

    # ------------------------------------------------------------ requests

    def begin(self, method: str, *args: Any) -> None:
        """Send a request. If the rank is dead, ``answer`` raises the error."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send((method, args))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Return the answer to the oldest request."""
        try:
            if not self._pipe.poll(timeout_s):
                raise RankError(f"{self} did not answer in {timeout_s} s")
            good, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RankError(f"{self} is dead") from None
        if not good:
            raise RankError(f"{self}: {value}")
        return value

    def ask(self, method: str, *args: Any) -> Any:
        """Send a request and return the answer."""
        self.begin(method, *args)
        return self.answer()

    # ------------------------------------------------------------ signals

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        give_up = time.monotonic() + ANSWER_S
        while self._state() != "T":
            if time.monotonic() > give_up:
                raise RankError(f"{self} does not stop")
            time.sleep(0.001)

    def _state(self) -> str:
        """Return the state that Linux reports; elsewhere assume that the process has stopped."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
                return file.read().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "T"

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def hang_up(self) -> None:
        """Close the pipe so that the process ends, even if it is stopped."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            self.resume()

    def end(self) -> None:
        """Hang up, and kill the process if it does not end."""
        self.hang_up()
        self.process.join(END_S)
        self.kill()

    def __repr__(self) -> str:
        return f"<{self.spec.role} {self.spec.name}/{self.spec.rank} pid {self.process.pid}>"
