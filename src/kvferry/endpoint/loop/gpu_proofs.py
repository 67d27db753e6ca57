"""Proofs of content in a GPU's memory, which the loop thread launches step by step.

A turn launches one step at most, and a later turn sees that it is finished. Few steps are in flight
at a time, so that copies and the engine's kernels wait for little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import NamedTuple, Protocol, cast

from kvferry.endpoint.jobs import ProofJob
from kvferry.endpoint.outgoing import Waitable
from kvferry.endpoint.poll_backoff import backoff_s
from kvferry.errors import KvferryError
from kvferry.memory.checksum.devices import SumsInSteps

# Steps in flight.
MAX_STEPS = 2


class LaunchedSums(SumsInSteps, Protocol):
    """Sums on a GPU. ``event`` is the end of the step that was launched last."""

    event: Waitable

    def drain(self) -> None:
        """Wait until no step runs."""


class _Step(NamedTuple):
    """A launched step of a proof."""

    launched_at: float
    event: Waitable
    job: ProofJob
    is_last: bool


class GpuProofs:
    """Proofs of one endpoint on a GPU, one after another."""

    def __init__(self) -> None:
        self._waiting: deque[ProofJob] = deque()
        self._running: deque[_Step] = deque()
        self._failed: list[ProofJob] = []

    def submit(self, job: ProofJob) -> None:
        """Start this proof when those before it are launched."""
        self._waiting.append(job)

    def wakeup(self) -> float:
        """Return after how many seconds the loop must call ``finished`` again."""
        if self._failed or self._may_launch:
            return 0.0
        if not self._running:
            return inf
        return backoff_s(time.monotonic() - self._running[0].launched_at)

    @property
    def _may_launch(self) -> bool:
        return bool(self._waiting) and len(self._running) < MAX_STEPS

    def launch(self) -> None:
        """Launch the next step, if not too many are in flight."""
        if not self._may_launch:
            return
        job = self._waiting[0]
        try:
            more = job.step()
        except KvferryError as error:
            self._waiting.popleft()
            _drain(job)  # Part of it may have been launched.
            job.fail(str(error))
            self._failed.append(job)
            return
        if not more:
            self._waiting.popleft()
        event = cast("LaunchedSums", job.sums).event
        self._running.append(_Step(time.monotonic(), event, job, not more))

    def finished(self) -> Iterator[ProofJob]:
        """Return finished proofs. Steps finish in their order."""
        while self._running and (problem := event_result(self._running[0].event)) is not None:
            step = self._running.popleft()
            if problem:
                self._forget(step.job)
                step.job.fail(problem)
            elif step.is_last:
                step.job.finish()
            if problem or step.is_last:
                yield step.job
        failed, self._failed = self._failed, []
        yield from failed

    def _forget(self, job: ProofJob) -> None:
        """Launch no more of a proof, and wait for none of its steps: the GPU has failed."""
        self._waiting = deque(one for one in self._waiting if one is not job)
        self._running = deque(step for step in self._running if step.job is not job)

    def close(self) -> None:
        """Wait until nothing runs. The loop has ended, so no results are needed."""
        for step in self._running:
            _drain(step.job)


def _drain(job: ProofJob) -> None:
    if job.sums is not None:
        with suppress(RuntimeError):  # The GPU has failed, so nothing runs on it.
            cast("LaunchedSums", job.sums).drain()


def event_result(event: Waitable) -> str | None:
    """Return the problem of a finished launch, empty if there is none; None while it runs."""
    try:
        return "" if event.query() else None
    except RuntimeError as error:  # Nothing runs on the device after this.
        return f"the GPU failed: {error}"
