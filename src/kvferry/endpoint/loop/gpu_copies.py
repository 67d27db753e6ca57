"""A copier that launches copies on a GPU from the loop thread and polls for their end.

The copies submitted in one turn are launched at its end as one kernel, and a later turn sees that
they are finished. A separate thread took up to a millisecond per hand-off, because the threads of a
process share Python's GIL (ADR 21).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from kvferry.endpoint.copy_thread import Copier
from kvferry.endpoint.jobs import CopyJob, ProofJob, ScatterJob, WriteJob
from kvferry.endpoint.loop.gpu_proofs import GpuProofs, event_result
from kvferry.endpoint.outgoing import Waitable
from kvferry.endpoint.poll_backoff import backoff_s
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import KvferryError
from kvferry.memory.copy.gpu_tables import GpuCopy
from kvferry.plan.bind import Binding

if TYPE_CHECKING:
    from kvferry.memory.copy.gpu import GpuCopier

# Copies per launch.
MAX_BATCH = 32

_Bound = tuple[CopyJob, Binding]


class GpuCopies(Copier):
    """Copies of one endpoint on a GPU, all from its loop thread."""

    def __init__(self, copier: GpuCopier) -> None:
        self.heartbeat = ThreadHeartbeat("copy")
        self._gpu = copier
        self._waiting: deque[CopyJob] = deque()
        # Launch time, event and jobs of each launch.
        self._running: deque[tuple[float, Waitable, list[_Bound]]] = deque()
        self._failed: list[CopyJob] = []
        # Preparations to make while nothing runs.
        self._idle_work: deque[Callable[[], None]] = deque(maxlen=MAX_BATCH)
        self._proofs = GpuProofs()

    def submit(self, job: CopyJob | ProofJob) -> None:
        """Launch this job at the end of the turn; of a proof, its first step."""
        if isinstance(job, ProofJob):
            self._proofs.submit(job)
        else:
            self._waiting.append(job)

    def prebind(self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        """Prepare a copy that is likely to be submitted soon. Raises what the copy would raise."""
        self._gpu.prebind(GpuCopy(binding, sources, targets))

    def wakeup(self) -> float:
        """Return after how many seconds the loop must call ``finished`` again."""
        if self._failed:
            return 0.0
        if not self._running:
            return self._proofs.wakeup()
        # The launch may wait for an engine's computation, so back off.
        launched_at, _, _ = self._running[0]
        return min(backoff_s(time.monotonic() - launched_at), self._proofs.wakeup())

    def finished(self) -> Iterator[CopyJob | ProofJob]:
        """Return finished jobs. Launches finish in their order."""
        while self._running and (problem := event_result(self._running[0][1])) is not None:
            *_, bound = self._running.popleft()
            for job, binding in bound:
                if problem:
                    job.fail(problem)
                elif isinstance(job, WriteJob):
                    job.slot_filled(binding)
                yield job
        failed, self._failed = self._failed, []
        yield from failed
        yield from self._proofs.finished()

    def launch(self, *, urgent: bool = False) -> None:
        """Start the jobs submitted in this turn; if ``urgent``, postpone early gathers.

        With nothing to start and nothing running, prepare the next copies.
        """
        if self._waiting:
            jobs = [job for job in self._waiting if not (urgent and _is_early(job))]
            self._waiting = deque(job for job in self._waiting if urgent and _is_early(job))
            for first in range(0, len(jobs), MAX_BATCH):
                self._start(jobs[first : first + MAX_BATCH])
            scatters = [job for job in jobs if isinstance(job, ScatterJob)]
            self._idle_work.extend(job.when_idle for job in scatters if job.when_idle is not None)
        self._proofs.launch()
        while self._idle_work and not self._running:
            self._idle_work.popleft()()

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
            self._running.append((time.monotonic(), self._gpu.copy(copies), bound))
        except KvferryError as error:
            # Part of it may have been launched. After the drain, nothing runs or the GPU failed.
            with suppress(RuntimeError):
                self._gpu.drain()
            for job, _ in bound:
                self._fail(job, error)

    def _fail(self, job: CopyJob, error: KvferryError) -> None:
        job.fail(str(error))
        self._failed.append(job)

    def close(self) -> None:
        """Wait until nothing runs. The loop has ended, so no results are needed."""
        with suppress(RuntimeError):  # The GPU has failed, so nothing runs on it.
            self._gpu.drain()
        self._proofs.close()


def _is_early(job: CopyJob) -> bool:
    return isinstance(job, WriteJob) and job.is_early
