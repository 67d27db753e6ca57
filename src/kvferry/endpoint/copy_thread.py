"""Copiers: who gathers into slots and scatters out of them.

The owner never waits for a copy. On the host a thread copies, one job after another, and a
gather that has ended goes straight on to the transport_thread, unless it was made ahead. A GPU
copies by
itself and needs no thread (``owner.gpu_copies``).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf

from kvferry.endpoint.jobs import CopyJob, WriteJob
from kvferry.endpoint.transport_thread import ThreadBroke
from kvferry.endpoint.watchdog import ThreadHeartbeat
from kvferry.errors import KvferryError
from kvferry.memory.copy.cpu import copy_binding
from kvferry.plan.bind import Binding
from kvferry.transports.mailbox import Mailbox

CopierNews = CopyJob | ThreadBroke


class Copier(ABC):
    """Who does the copies of one endpoint. Called by the owner."""

    heartbeat: ThreadHeartbeat

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Do this after what was submitted before. Never waits."""

    def ended(self) -> Iterable[CopyJob]:
        """Every turn: what is over, where no thread tells of it."""
        return ()

    def launch(self, *, urgent: bool = False) -> None:  # noqa: B027 - a thread needs no telling
        """At the end of every turn: start what it asked for; if ``urgent``, nothing ahead."""

    def prebind(  # noqa: B027 - a core has nothing to get ready
        self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> None:
        """This may be copied soon, from there or elsewhere. Raises as the copy itself would."""

    def wakeup(self) -> float:
        """After how many seconds at most to turn again although nothing comes."""
        return inf

    @abstractmethod
    def close(self) -> None:
        """Finish what was begun, and end."""


class CopyThread(Copier):
    """Copies with the CPU, on a thread of its own, where it calls ``tell`` and ``post``.

    Neither may wait.
    """

    def __init__(
        self, name: str, tell: Callable[[CopierNews], None], post: Callable[[WriteJob], None]
    ) -> None:
        self._jobs: Mailbox[CopyJob | None] = Mailbox()
        self._tell = tell
        self._post = post
        self.heartbeat = ThreadHeartbeat("copier", lambda: len(self._jobs) > 0)
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
            self.heartbeat.beat(inf)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                binding = job.bind()
                # The gathered bytes will be read again at once.
                keep = isinstance(job, WriteJob)
                copy_binding(binding, job.sources, job.targets, keep=keep)
            except KvferryError as error:
                job.fail(str(error))
                self._tell(job)
                continue
            if isinstance(job, WriteJob):
                job.fill(binding)
                if not job.is_ahead:
                    self._post(job)
                    continue
            self._tell(job)

    def _next(self) -> CopyJob | None:
        """Wait for a job, and show that somebody does."""
        self.heartbeat.beat(inf)
        job = self._jobs.get()
        self.heartbeat.beat(time.monotonic())
        return job
