"""Copies on a GPU: launched by the owner itself, and looked after turn by turn.

A GPU copies by itself, so no thread of ours need wait for it: what a turn asked for is
launched at its end, as one copy, and its end is seen in one of the next turns. Handing it
to a thread took up to a millisecond each time, because two threads of one process share
Python's lock (ADR 21).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Protocol

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.jobs import CopyJob, ScatterJob, WriteJob
from kvferry.endpoint.poll_backoff import pause
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import KvferryError
from kvferry.memory.copy.gpu_tables import GpuCopy
from kvferry.plan.bind import Binding

# Copies that are launched as one.
MAX_BATCH = 32

_Bound = tuple[CopyJob, Binding]


class GpuEvent(Protocol):
    """When a launch is over."""

    def query(self) -> bool:
        """Whether it is. Raises ``RuntimeError`` where the GPU has failed."""


class GpuEngine(Protocol):
    """What launches: ``copy.gpu.GpuCopier``."""

    def copy(self, jobs: Sequence[GpuCopy]) -> GpuEvent:
        """Queue the jobs as one copy."""

    def prebind(self, job: GpuCopy) -> None:
        """This may be copied soon, from here or elsewhere."""

    def drain(self) -> None:
        """Wait until nothing that was queued still runs."""


class GpuCopies(Copier):
    """The copies of one endpoint, all on its owner's thread."""

    def __init__(self, engine: GpuEngine) -> None:
        self.heartbeat = ThreadHeartbeat("copies")
        self._engine = engine
        self._waiting: deque[CopyJob] = deque()
        # When each was launched, when it is over, and what it is.
        self._running: deque[tuple[float, GpuEvent, list[_Bound]]] = deque()
        self._failed: list[CopyJob] = []
        # What can be done when nothing runs.
        self._leisurely: deque[Callable[[], None]] = deque(maxlen=MAX_BATCH)

    def submit(self, job: CopyJob) -> None:
        """Launch this at the end of the turn."""
        self._waiting.append(job)

    def prebind(self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        """Have made what the GPU will be told."""
        self._engine.prebind(GpuCopy(binding, sources, targets))

    def wakeup(self) -> float:
        """Soon, while something runs."""
        if self._failed:
            return 0.0
        if not self._running:
            return inf
        # It may have to wait for what an engine computes, and then takes long.
        launched, _, _ = self._running[0]
        return pause(time.monotonic() - launched)

    def ended(self) -> Iterator[CopyJob]:
        """Copies that are over. Launches end in their order."""
        while self._running and (problem := _end_of(self._running[0][1])) is not None:
            *_, bound = self._running.popleft()
            for job, binding in bound:
                if problem:
                    job.fail(problem)
                elif isinstance(job, WriteJob):
                    job.fill(binding)
                yield job
        failed, self._failed = self._failed, []
        yield from failed

    def launch(self, *, urgent: bool = False) -> None:
        """Start what this turn asked for, or use that there is nothing to wait for."""
        if self._waiting:
            jobs = [job for job in self._waiting if not (urgent and _is_ahead(job))]
            self._waiting = deque(job for job in self._waiting if urgent and _is_ahead(job))
            for first in range(0, len(jobs), MAX_BATCH):
                self._start(jobs[first : first + MAX_BATCH])
            scatters = [job for job in jobs if isinstance(job, ScatterJob)]
            self._leisurely.extend(job.at_leisure for job in scatters if job.at_leisure is not None)
        while self._leisurely and not self._running:
            self._leisurely.popleft()()

    def _start(self, jobs: list[CopyJob]) -> None:
        bound: list[_Bound] = []
        for job in jobs:
            try:
                bound.append((job, job.bind()))
            except KvferryError as error:
                self._fail(job, error)
        if not bound:
            return
        try:
            copies = [GpuCopy(binding, job.sources, job.targets) for job, binding in bound]
            self._running.append((time.monotonic(), self._engine.copy(copies), bound))
        except KvferryError as error:
            # Some of it may have been launched: it is over after that, or the GPU is.
            with suppress(RuntimeError):
                self._engine.drain()
            for job, _ in bound:
                self._fail(job, error)

    def _fail(self, job: CopyJob, error: KvferryError) -> None:
        job.fail(str(error))
        self._failed.append(job)

    def close(self) -> None:
        """Let what runs end. The owner is gone by now, and nobody is told."""
        with suppress(RuntimeError):  # Of a GPU that has failed, on which nothing runs any more.
            self._engine.drain()


def _is_ahead(job: CopyJob) -> bool:
    """Whether nobody waits for it yet."""
    return isinstance(job, WriteJob) and job.is_ahead


def _end_of(event: GpuEvent) -> str | None:
    """What is to be said against a copy that is over; None while it runs."""
    try:
        return "" if event.query() else None
    except RuntimeError as error:  # After which nothing runs on the device.
        return f"the GPU failed: {error}"
