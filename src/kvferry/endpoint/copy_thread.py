"""Copiers gather pages into staging slots and scatter slots into pages.

The loop never waits for a copy. On the host, ``CopyThread`` copies one job after another and
passes a filled slot straight to the transport thread. A GPU copies asynchronously and needs no
thread (``loop/gpu_copies.py``).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf

from kvferry.endpoint.jobs import CopyJob, ProofJob, WriteJob
from kvferry.endpoint.transport_thread import ThreadFailed
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import KvferryError
from kvferry.memory.copy.cpu import copy_binding
from kvferry.plan.bind import Binding
from kvferry.transports.mailbox import Mailbox

CopyResult = CopyJob | ProofJob | ThreadFailed


class Copier(ABC):
    """Performs the copies of one endpoint. The loop thread calls every method."""

    heartbeat: ThreadHeartbeat

    @abstractmethod
    def submit(self, job: CopyJob | ProofJob) -> None:
        """Queue a job behind those submitted before. Never waits."""

    def finished(self) -> Iterable[CopyJob | ProofJob]:
        """Return finished jobs. Empty for a copier that delivers results to the inbox."""
        return ()

    def launch(self, *, urgent: bool = False) -> None:  # noqa: B027 - only a GPU needs it
        """Start the jobs submitted in this turn; if ``urgent``, postpone early gathers."""

    def prebind(  # noqa: B027 - only a GPU needs it
        self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> None:
        """Prepare a copy that is likely to be submitted soon. Raises what the copy would raise."""

    def wakeup(self) -> float:
        """Return after how many seconds the loop must call ``finished`` again."""
        return inf

    @abstractmethod
    def close(self) -> None:
        """Finish all started copies, then stop."""


class CopyThread(Copier):
    """Copies with the CPU, on its own thread.

    It calls ``on_result`` with finished jobs and ``write`` with jobs whose slot is filled.
    Neither may wait.
    """

    def __init__(
        self, name: str, on_result: Callable[[CopyResult], None], write: Callable[[WriteJob], None]
    ) -> None:
        self._jobs: Mailbox[CopyJob | ProofJob | None] = Mailbox()
        self._on_result = on_result
        self._write = write
        self.heartbeat = ThreadHeartbeat("copy", lambda: len(self._jobs) > 0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob | ProofJob) -> None:
        """Queue a job behind those submitted before. Never waits."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the submitted jobs and join the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self.heartbeat.beat(time.monotonic())
                if isinstance(job, ProofJob):
                    self._prove(job)
                else:
                    self._copy(job)
                self.heartbeat.beat(inf)
        except Exception as error:
            self._on_result(ThreadFailed("copy", error))
        finally:
            self.heartbeat.beat(inf)

    def _prove(self, job: ProofJob) -> None:
        """Take a step of a proof, and let jobs that were submitted meanwhile go first."""
        try:
            more = job.step()
        except KvferryError as error:
            job.fail(str(error))
            self._on_result(job)
            return
        if more:
            self._jobs.put(job)
        else:
            job.finish()
            self._on_result(job)

    def _copy(self, job: CopyJob) -> None:
        is_gather = isinstance(job, WriteJob)
        try:
            binding = job.bind()
            # The transport reads gathered bytes at once, so keep them in the CPU's cache.
            copy_binding(binding, job.sources, job.targets, keep=is_gather)
        except KvferryError as error:
            job.fail(str(error))
            self._on_result(job)
            return
        if isinstance(job, WriteJob):
            job.slot_filled(binding)
            if not job.is_early:
                self._write(job)
                return
        self._on_result(job)
