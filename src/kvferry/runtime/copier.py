"""The copier: a thread that gathers into slots and scatters out of them.

The owner never copies and never waits for a copy. Jobs run in order; a GPU runs
them on a stream of its own, so a job is started when it is its turn and told of
when the GPU has done it. A gather that has ended goes straight on to the mover.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from math import inf
from queue import Empty
from typing import Any, NamedTuple

from kvferry.copy.cpu import copy_binding
from kvferry.errors import KvferryError
from kvferry.ids import Op, Session
from kvferry.mailbox import Mailbox
from kvferry.plan.bind import Binding
from kvferry.plan.choose import Path
from kvferry.plan.places import Base
from kvferry.regions import Device
from kvferry.runtime.mover.mover import Posting, ThreadBroke
from kvferry.runtime.pulse import Pulse

GPU_POLL_S = 20e-6
MAX_BATCH = 32


class BulkWrite(NamedTuple):
    """Where a slot that has been filled is to be written."""

    session: Session
    source: Base
    target: Base


class CopyJob(NamedTuple):
    """Bind, and copy between regions at those addresses.

    ``then``: what was gathered is written in bulk, and will be read again at once. Without
    it, the end of the copy is told.
    """

    op: Op
    bind: Callable[[], Binding]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    then: BulkWrite | None = None


class Copied(NamedTuple):
    """A copy is over and touches nothing any more; ``problem`` is empty if it went well."""

    op: Op
    problem: str = ""


CopierNews = Copied | ThreadBroke


class Copier(ABC):
    """One thread that does the copies of one endpoint.

    Calls ``tell`` and ``post`` on its thread; neither may wait.
    """

    def __init__(
        self, name: str, tell: Callable[[CopierNews], None], post: Callable[[Posting], None]
    ) -> None:
        self._jobs: Mailbox[CopyJob | None] = Mailbox()
        self._tell = tell
        self._post = post
        self.pulse = Pulse("copier", lambda: len(self._jobs) > 0)
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Do this after what was submitted before. Never waits."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what was submitted, and end."""
        self._jobs.put(None)
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._tell(ThreadBroke("copier", error))
        finally:
            self.pulse.beat(inf)

    @abstractmethod
    def _run(self) -> None:
        """The thread."""

    def _next(self, timeout_s: float | None = None) -> CopyJob | None:
        """Wait for a job, and show that somebody does. Raises ``queue.Empty``."""
        self.pulse.beat(inf if timeout_s is None else time.monotonic() + timeout_s)
        job = self._jobs.take(timeout_s)
        self.pulse.beat(time.monotonic())
        return job

    def _done(self, job: CopyJob, binding: Binding) -> None:
        if job.then is None:
            self._tell(Copied(job.op))
            return
        session, source, target = job.then
        bulk = Binding.bulk(source, target, binding.num_bytes)
        self._post(Posting(job.op, session, bulk, Path.STAGED))


class HostCopier(Copier):
    """Copies with the CPU."""

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                binding = job.bind()
                copy_binding(binding, job.sources, job.targets, keep=job.then is not None)
            except KvferryError as error:
                self._tell(Copied(job.op, str(error)))
            else:
                self._done(job, binding)


class GpuJobs(Copier):
    """Copies with a GPU: whatever waits is started as one copy, and told of when it ends."""

    def __init__(
        self,
        name: str,
        tell: Callable[[CopierNews], None],
        post: Callable[[Posting], None],
        device: Device,
    ) -> None:
        from kvferry.copy.gpu import GpuCopier, GpuCopy  # noqa: PLC0415 - needs torch and a GPU

        self._gpu = GpuCopier(device)
        self._gpu.warm_up()
        self._make = GpuCopy
        super().__init__(name, tell, post)

    def _run(self) -> None:
        running: deque[tuple[Any, list[_Bound]]] = deque()
        while (jobs := self._take(wait=not running)) is not None:
            if jobs:
                self._start(jobs, running)
            while running and _is_over(running[0][0]):
                self._end(*running.popleft())
        for event, done in running:
            self._end(event, done)

    def _take(self, *, wait: bool) -> list[CopyJob] | None:
        """The jobs that wait, none after a moment; None at the end."""
        jobs: list[CopyJob] = []
        try:
            job = self._next(None if wait else GPU_POLL_S)
            while job is not None and len(jobs) < MAX_BATCH:
                jobs.append(job)
                job = self._jobs.take_now()
        except Empty:
            return jobs
        if job is None:
            if not jobs:
                return None
            self._jobs.put(None)
        else:
            jobs.append(job)
        return jobs

    def _start(self, jobs: list[CopyJob], running: deque[tuple[Any, list[_Bound]]]) -> None:
        bound: list[_Bound] = []
        for job in jobs:
            try:
                bound.append((job, job.bind()))
            except KvferryError as error:
                self._tell(Copied(job.op, str(error)))
        if bound:
            copies = [self._make(binding, job.sources, job.targets) for job, binding in bound]
            running.append((self._gpu.copy(copies), bound))

    def _end(self, event: Any, done: list[_Bound]) -> None:
        """Say how a copy ended. After a CUDA error nothing runs on the device any more."""
        try:
            event.synchronize()
        except RuntimeError as error:
            for job, _ in done:
                self._tell(Copied(job.op, f"the GPU failed: {error}"))
        else:
            for job, binding in done:
                self._done(job, binding)


_Bound = tuple[CopyJob, Binding]


def _is_over(event: Any) -> bool:
    """Whether a copy has ended, well or not."""
    try:
        return bool(event.query())
    except RuntimeError:
        return True


def copier_for(
    device: Device,
    name: str,
    tell: Callable[[CopierNews], None],
    post: Callable[[Posting], None],
) -> Copier:
    """The copier of memory on that device."""
    if device.is_host:
        return HostCopier(name, tell, post)
    return GpuJobs(name, tell, post, device)
