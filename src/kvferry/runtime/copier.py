"""Copiers: who gathers into slots and scatters out of them.

The owner never waits for a copy. On the host a thread copies, one job after another, and a
gather that has ended goes straight on to the mover, unless it was made ahead. A GPU copies by
itself and needs no thread (``owner.gpu_copies``).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from kvferry.copy.cpu import copy_binding
from kvferry.errors import KvferryError
from kvferry.ids import Op, Session
from kvferry.mailbox import Mailbox
from kvferry.plan.bind import Binding
from kvferry.plan.choose import Path
from kvferry.plan.places import Base
from kvferry.runtime.mover.mover import Posting, ThreadBroke
from kvferry.runtime.pulse import Pulse


class BulkWrite(NamedTuple):
    """Where a slot that has been filled is to be written; without a ``target``, not yet."""

    session: Session
    source: Base
    target: Base | None = None


class Copied(NamedTuple):
    """A copy is over and touches nothing any more; ``problem`` is empty if it went well."""

    op: Op
    problem: str = ""


class Filled(NamedTuple):
    """A slot is filled that nobody has said the target of; so much is in it."""

    op: Op
    num_bytes: int


class CopyJob(NamedTuple):
    """Bind, and copy between regions at those addresses.

    ``then``: what was gathered is written in bulk, and will be read again at once, or when it
    is known where to. Without it, the end of the copy is told. ``at_leisure``: what its owner
    can do, where something else than a core copies, when nothing is being copied.
    """

    op: Op
    bind: Callable[[], Binding]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    then: BulkWrite | None = None
    at_leisure: Callable[[], None] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether nobody waits for it yet."""
        return self.then is not None and self.then.target is None

    def outcome(self, binding: Binding) -> Copied | Filled | Posting:
        """What comes of it once it went well."""
        if self.then is None:
            return Copied(self.op)
        session, source, target = self.then
        if target is None:
            return Filled(self.op, binding.num_bytes)
        bulk = Binding.bulk(source, target, binding.num_bytes)
        return Posting(self.op, session, bulk, Path.STAGED)


CopierNews = Copied | Filled | ThreadBroke


class Copier(ABC):
    """Who does the copies of one endpoint. Called by the owner."""

    pulse: Pulse

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Do this after what was submitted before. Never waits."""

    def ended(self) -> Iterable[Copied | Filled | Posting]:
        """Every turn: what is over, where no thread tells of it."""
        return ()

    def launch(self, *, hurried: bool = False) -> None:  # noqa: B027 - a thread needs no telling
        """At the end of every turn: start what it asked for; if ``hurried``, nothing ahead."""

    def foresee(  # noqa: B027 - a core has nothing to get ready
        self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> None:
        """This may be copied soon, from there or elsewhere. Raises as the copy itself would."""

    def wakeup(self) -> float:
        """After how many seconds at most to turn again although nothing comes."""
        return inf

    @abstractmethod
    def close(self) -> None:
        """Finish what was begun, and end."""


class HostCopier(Copier):
    """Copies with the CPU, on a thread of its own, where it calls ``tell`` and ``post``.

    Neither may wait.
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

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                binding = job.bind()
                copy_binding(binding, job.sources, job.targets, keep=job.then is not None)
            except KvferryError as error:
                self._tell(Copied(job.op, str(error)))
                continue
            outcome = job.outcome(binding)
            if isinstance(outcome, Posting):
                self._post(outcome)
            else:
                self._tell(outcome)

    def _next(self) -> CopyJob | None:
        """Wait for a job, and show that somebody does."""
        self.pulse.beat(inf)
        job = self._jobs.take()
        self.pulse.beat(time.monotonic())
        return job
