"""Probes in child processes: what loads foreign code may crash or hang, and must not take us along.

A child writes into files and not into pipes, because whatever it starts itself
could hold a pipe open after its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from kvferry.errors import KvferryError

PROBES = "kvferry.cli.doctor.checks.probes"
SHOWN = 200


class ProbeFailed(KvferryError):
    """A probe ended without an answer; the sentence says how."""


class ProbeChild:
    """One probe under way."""

    def __init__(self, words: tuple[str, ...], limit_s: float) -> None:
        self._what = f"the probe '{' '.join(words)}'"
        self._limit_s = limit_s
        self._end_at = time.monotonic() + limit_s
        self._files = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        try:
            self._out, self._err = self._file(), self._file()
            self._process = self._started(words)
        except OSError as error:
            self._problem = f"{self._what} can't be started ({error}); make room for a process"

    def _file(self) -> IO[bytes]:
        opened = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``end``, with the others
        return self._files.enter_context(opened)

    def _started(self, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
        # -P: nothing is imported from the folder that the user happens to be in. The path is
        # ours, so that the child finds what we would find.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", PROBES, *words],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )

    def answer(self) -> dict[str, Any]:
        """What the probe found. Raises ``ProbeFailed``."""
        if self._process is None:
            raise ProbeFailed(self._problem)
        try:
            status = self._process.wait(max(0.0, self._end_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise ProbeFailed(
                f"{self._what} did not end within {self._limit_s:g} s; "
                f"try again when the machine is less busy"
            ) from None
        if status:
            raise ProbeFailed(f"{self._what} ended with {_how(status)}{self._last_words()}")
        self._out.seek(0)
        # What foreign code prints comes before.
        last = self._out.read().strip().rpartition(b"\n")[2]
        return msgspec.json.decode(last, type=dict[str, Any])

    def _last_words(self) -> str:
        self._err.seek(0)
        lines = self._err.read().decode("utf-8", "replace").strip().splitlines()
        return f" ({lines[-1].strip()[:SHOWN]})" if lines else ""

    def end(self) -> None:
        """End it if it goes on, and give everything back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._files.close()


class Children:
    """Probes that end with the block, whatever happens in it."""

    def __init__(self) -> None:
        self._children: list[ProbeChild] = []

    def start(self, *words: str, limit_s: float) -> ProbeChild:
        """Begin a probe."""
        child = ProbeChild(words, limit_s)
        self._children.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.end()


def _how(status: int) -> str:
    if status > 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
