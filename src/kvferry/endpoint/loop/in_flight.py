"""Writes that the owner has begun itself, and asks after until they are over.

It asks often at first and then less and less (``naps``). To have another thread do this would
cost two hand-offs, each longer than most writes take.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from kvferry.endpoint.jobs import WriteJob
from kvferry.endpoint.poll_backoff import NAP_S, pause
from kvferry.transports.base import Transport

# A GPU writes a slot of some ten megabytes in less.
FRESH_S = 300e-6


class WritesInFlight:
    """Writes of one owner that go on."""

    def __init__(self) -> None:
        # Each with its transport, and when to ask after it.
        self._writes: dict[WriteJob, tuple[Transport, float]] = {}

    def add(self, job: WriteJob, transport: Transport) -> None:
        """Ask after this one from now on."""
        self._writes[job] = transport, job.started + NAP_S

    def ended(self, now: float) -> Iterator[WriteJob]:
        """Those that are over, of those whose time has come."""
        for job, (transport, due) in list(self._writes.items()):
            if due > now:
                continue
            ended = transport.check_write(job.op)
            if ended is None:
                self._writes[job] = transport, now + pause(now - job.started)
            else:
                del self._writes[job]
                job.end(ended)
                yield job

    def has_fresh(self, now: float) -> bool:
        """Whether one has begun so lately that it will be over soon."""
        return any(now < job.started + FRESH_S for job in self._writes)

    def wakeup(self) -> float:
        """When to ask again."""
        return min((due for _, due in self._writes.values()), default=inf)
