"""The copier: a thread that gathers into slots and scatters out of them.

The owner never copies and never waits for a copy. Jobs run in order; a GPU runs
them on a stream of its own, so a job is started when it is its turn and told of
when the GPU has done it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from kvferry.copy.cpu import copy_binding
from kvferry.errors import KvferryError
from kvferry.plan.bind import Binding
from kvferry.regions import Device

GPU_POLL_S = 20e-6
MAX_BATCH = 32


class CopyJob(NamedTuple):
    """Bind, copy between regions at those addresses, and say so. ``then`` gets the problem.

    ``keep``: what is written will be read again at once.
    """

    bind: Callable[[], Binding]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    then: Callable[[Binding | None, str], None]
    keep: bool = False


class Copier(ABC):
    """One thread that does the copies of one endpoint."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Do this after what was submitted before. Never waits."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what was submitted, and end."""
        self._jobs.put(None)
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """The thread."""


class HostCopier(Copier):
    """Copies with the CPU."""

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                binding = job.bind()
                copy_binding(binding, job.sources, job.targets, keep=job.keep)
            except KvferryError as error:
                job.then(None, str(error))
            else:
                job.then(binding, "")


class GpuJobs(Copier):
    """Copies with a GPU: whatever waits is started as one copy, and told of when it ends."""

    def __init__(self, name: str, device: Device) -> None:
        self._device = device
        super().__init__(name)

    def _run(self) -> None:
        from kvferry.copy.gpu import GpuCopier  # noqa: PLC0415 - needs torch and a GPU

        gpu = GpuCopier(self._device)
        gpu.warm_up()
        running: deque[tuple[Any, list[tuple[CopyJob, Binding]]]] = deque()
        while (jobs := self._take(wait=not running)) is not None:
            if jobs:
                self._start(gpu, jobs, running)
            while running and running[0][0].query():
                _tell(running.popleft()[1])
        for event, done in running:
            event.synchronize()
            _tell(done)

    def _take(self, *, wait: bool) -> list[CopyJob] | None:
        """The jobs that wait, none after a moment; None at the end."""
        jobs: list[CopyJob] = []
        try:
            job = self._jobs.get(timeout=None if wait else GPU_POLL_S)
            while job is not None and len(jobs) < MAX_BATCH:
                jobs.append(job)
                job = self._jobs.get_nowait()
        except Empty:
            return jobs
        if job is None:
            if not jobs:
                return None
            self._jobs.put(None)
        else:
            jobs.append(job)
        return jobs

    def _start(self, gpu: Any, jobs: list[CopyJob], running: deque[Any]) -> None:
        from kvferry.copy.gpu import Job  # noqa: PLC0415

        bound: list[tuple[CopyJob, Binding]] = []
        for job in jobs:
            try:
                bound.append((job, job.bind()))
            except KvferryError as error:
                job.then(None, str(error))
        if bound:
            copies = [Job(binding, job.sources, job.targets) for job, binding in bound]
            running.append((gpu.copy(copies), bound))


def _tell(done: list[tuple[CopyJob, Binding]]) -> None:
    for job, binding in done:
        job.then(binding, "")


def copier_for(device: Device, name: str) -> Copier:
    """The copier of memory on that device."""
    return HostCopier(name) if device.is_host else GpuJobs(name, device)
