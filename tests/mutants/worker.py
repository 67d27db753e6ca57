"""A worker: judges one mutant at a time in a copy of the tree.

It imports the modules that no mutant changes once. Each judge runs in a forked child, which
imports the mutated packages. A child that takes much longer than the judge needs for the real
code counts as hung, and the mutant as detected.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import py_compile
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from mutants.judges import Judge, judges_of
from mutants.mutate import Mutant

COPIED = ("src", "tests", "docs", "pyproject.toml", "ARCHITECTURE.md", "README.md", "examples")
UNMUTATED = "pytest hypothesis numpy msgspec zmq aiohttp prometheus_client kvferry.plan.bind"
MUTATED = tuple(f"kvferry.{row}" for row in ["protocol", "memory", "endpoint", "testing"])
# Limits that tell a hang from a slow machine: CPU seconds, and much longer wall seconds.
CPU_FACTOR, WALL_FACTOR, LEAST_S = 2.5, 4.0, 10.0
POLL_S = 0.02


class Unfit(Exception):
    """A judge fails on the real code, so it cannot judge mutants."""


@dataclass
class Worker:
    """A copy of the tree, and the time limits of each judge."""

    root: Path
    nice: int
    limits: dict[str, tuple[float, float]] = field(default_factory=dict)

    def judge(self, mutant: Mutant) -> str | None:
        """Return which judge detects a mutant; None if it survives."""
        judges = judges_of(mutant.path)
        for judge in judges:
            self._learn(judge)
        place = self.root / mutant.path
        original = place.read_bytes()
        place.write_text(mutant.source)
        try:
            answers = (self._ask(each, *self.limits[each.name]) for each in judges)
            return next((answer for answer in answers if answer), None)
        finally:
            place.write_bytes(original)

    def _learn(self, judge: Judge) -> None:
        if judge.name in self.limits:
            return
        begin, used = time.monotonic(), _children_cpu_s()
        if self._ask(judge, 600.0, 600.0):
            raise Unfit(
                f"the tests of judge {judge.name!r} fail on the unchanged code; fix that first"
            )
        cpu_s, wall_s = _children_cpu_s() - used, time.monotonic() - begin
        limits = CPU_FACTOR * cpu_s + LEAST_S / 4, WALL_FACTOR * wall_s + LEAST_S
        self.limits[judge.name] = limits

    def _ask(self, judge: Judge, cpu_s: float, wall_s: float) -> str | None:
        """Run a judge. Return its name if it detects the mutant, or else None."""
        child = os.fork()
        if not child:
            self._be_child(judge, int(cpu_s) + 1)
        try:
            status = _wait(child, time.monotonic() + wall_s)
            if status is None or os.WIFSIGNALED(status):
                return f"{judge.name} (hung)"
            return judge.name if status else None
        finally:
            # Also end the processes that it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    def _be_child(self, judge: Judge, cpu_s: int) -> None:
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.nice(self.nice)
            os.chdir(self.root)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            status = 0 if judge.is_content() else 1
        finally:
            os._exit(status)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait(child: int, until: float) -> int | None:
    """Return a child's exit status; None if it was killed at the limit."""
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@contextlib.contextmanager
def worker(tree: Path, nice: int) -> Iterator[Worker]:
    """Copy the tree and prepare this process to judge in it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder)
        _copy(tree, root)
        _prepare(root)
        yield Worker(root, nice)


def _copy(tree: Path, root: Path) -> None:
    for name in COPIED:
        source = tree / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, root / name)
    # A mutant may have the size and the time stamp of the original, so compare contents.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(root / "src", quiet=2, invalidation_mode=mode)


def _prepare(root: Path) -> None:
    """Import from the copy, and import unmutated modules now."""
    paths = [str(root / "src"), str(root / "tests")]
    sys.path[:0] = paths
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for name in UNMUTATED.split():
        import_module(name)
    early = [name for name in sys.modules if name.startswith(MUTATED)]
    assert not early, f"imported before it could be mutated: {early}"


def work(tree: Path, nice: int, pipe: Connection) -> None:
    """Judge the mutants that arrive through the pipe, until it closes."""
    # Clean up the copy on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with worker(tree, nice) as judging:
        while True:
            try:
                pipe.send(judging.judge(pipe.recv()))
            except Unfit as error:
                pipe.send(error)
            except (EOFError, BrokenPipeError):
                return
