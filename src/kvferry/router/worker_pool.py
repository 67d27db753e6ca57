"""The workers that a router knows, and the choice of the next one. Pure: time is passed in.

A worker gets requests while it is *up*: its last health check succeeded, and no request has
failed since. A worker that stays silent is *lost*, which also fails its requests in flight. A
worker that has rejected a request is left out for a while, or until it has restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvferry import KvferryError
from kvferry.router.options import MAX_MISSES, BalancePolicy

# vLLM's health checks succeed while it shuts down, but it rejects requests. This is how often the
# router tries again whether such a worker accepts them.
REJECTED_S = 30.0
# Status of a reference worker that takes no new requests.
DRAINING = "draining"


class WorkerRole(StrEnum):
    """Which half of a request a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class AnnouncedWorker(msgspec.Struct, frozen=True):
    """A worker from the discovery service or from the options."""

    url: str
    role: WorkerRole
    name: str = ""


class WorkerUnhealthy(KvferryError):
    """A worker reports that it cannot be used."""


class AllFull(KvferryError):
    """Every worker that could take a request has as many as it takes."""


class WorkerHealth(msgspec.Struct, frozen=True):
    """Fields of a worker's ``/healthz`` that the router reads. A limit of None is unknown."""

    role: str
    name: str
    model: str
    running: int = 0
    waiting: int = 0
    max_in_flight: int | None = None
    in_flight_tokens: int = 0
    max_in_flight_tokens: int | None = None
    life: str = ""
    proof: str = ""
    problem: str = ""
    status: str = ""


@dataclass(eq=False, slots=True)
class Worker:
    """One worker. ``in_flight`` counts this router's requests, ``others`` all further ones.

    ``refuses``: the worker has answered that it is full, or its tokens are used up, and no request
    has ended there since. ``draining``: it takes no new requests, and ends after the last one.
    ``on_change`` is called when a request ends.
    """

    url: str
    role: WorkerRole
    name: str
    fixed: bool
    model: str = ""
    up: bool = False
    listed: bool = True
    misses: int = 0
    problem: str = "not checked yet"
    in_flight: int = 0
    others: int = 0
    max_in_flight: int | None = None
    refuses: bool = False
    draining: bool = False
    on_change: Callable[[], None] = lambda: None
    last_chosen: int = 0
    well_at: float = float("-inf")
    left_out_until: float = float("-inf")
    life: str = ""
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def load(self) -> int:
        """Number of requests at the worker, as far as known."""
        return self.in_flight + self.others

    @property
    def is_full(self) -> bool:
        """Whether the worker takes no request beside those that it has."""
        is_at_limit = self.max_in_flight is not None and self.load >= self.max_in_flight
        return self.refuses or is_at_limit

    @contextlib.contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request in flight while the block runs."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.refuses = False
            self.on_change()

    def mark_down(self, problem: str) -> None:
        """Use the worker no more until a health check succeeds."""
        self.up, self.problem = False, problem

    def leave_out(self, now: float) -> None:
        """Use the worker no more for a while, because it rejects requests."""
        self.left_out_until = now + REJECTED_S
        self.draining = True
        self.mark_down("it accepts no new requests")

    def __str__(self) -> str:
        return f"{self.role} worker {self.name or self.url}"


class WorkerPool:
    """All known workers.

    ``max_in_flight`` is for decode workers that report no limit. ``on_change`` is called when a
    worker may have become free, or has gone.
    """

    def __init__(
        self,
        policy: BalancePolicy,
        lost_s: float,
        fixed: Iterable[AnnouncedWorker] = (),
        max_in_flight: int | None = None,
    ) -> None:
        self._policy = policy
        self._lost_s = lost_s
        self._max_in_flight = max_in_flight
        self.on_change: Callable[[], None] = lambda: None
        self._choices = 0
        self._workers: dict[str, Worker] = {}
        for entry in fixed:
            self._add(entry, fixed=True)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers."""
        return tuple(self._workers.values())

    def models(self) -> list[str]:
        """Return the models of all decode workers, up or not."""
        found = {worker.model for worker in self.workers if worker.role is WorkerRole.DECODE}
        return sorted(found - {""})

    def _add(self, entry: AnnouncedWorker, *, fixed: bool) -> None:
        self._workers[entry.url] = Worker(
            *(entry.url, entry.role, entry.name, fixed), on_change=self._changed
        )

    def _changed(self) -> None:
        self.on_change()

    # ------------------------------------------------------------ health

    def update_listed(self, announced: Iterable[AnnouncedWorker]) -> None:
        """Take the discovery service's list. An unlisted worker stays while it is up."""
        listed = {entry.url: entry for entry in announced}
        for url, entry in listed.items():
            worker = self._workers.get(url)
            if worker is None:
                self._add(entry, fixed=False)
            elif not worker.fixed:
                worker.role, worker.name, worker.listed = entry.role, entry.name, True
        for worker in self.workers:
            if not worker.fixed and worker.url not in listed:
                worker.listed = False
                self._forget_if_gone(worker)

    def mark_up(self, worker: Worker, health: WorkerHealth, now: float) -> None:
        """Take a successful health check."""
        if health.role != worker.role:
            worker.mark_down(f"it is a {health.role} worker, not a {worker.role} worker")
            return
        worker.name, worker.model, worker.life = health.name, health.model, health.life
        worker.misses = 0
        if health.status == DRAINING:
            worker.leave_out(now)
        elif now >= worker.left_out_until:
            worker.up, worker.problem, worker.draining = True, "", False
        worker.others = max(0, health.running + health.waiting - worker.in_flight)
        worker.well_at = now
        worker.lost.clear()
        worker.max_in_flight = health.max_in_flight
        if worker.max_in_flight is None and worker.role is WorkerRole.DECODE:
            worker.max_in_flight = self._max_in_flight
        most = health.max_in_flight_tokens
        worker.refuses = most is not None and health.in_flight_tokens >= most
        self.on_change()

    def mark_missed(self, worker: Worker, problem: str, now: float, *, sure: bool) -> None:
        """Take a failed health check; ``sure`` means that it was not only slow."""
        worker.misses += 1
        if sure:
            # It has ended, and accepts requests when it is well again.
            worker.left_out_until, worker.draining = float("-inf"), False
        if sure or worker.misses >= MAX_MISSES:
            worker.mark_down(problem)
        # A worker that is stopping may still finish its requests; a silent one does not.
        self.mark_lost_if_silent(worker, now)
        self._forget_if_gone(worker)
        self.on_change()

    def mark_lost_if_silent(self, worker: Worker, now: float) -> None:
        """Mark a worker lost if it missed a check and has been silent for ``lost_s``."""
        if worker.misses and now >= worker.well_at + self._lost_s:
            worker.lost.set()

    def _forget_if_gone(self, worker: Worker) -> None:
        if not (worker.fixed or worker.listed or worker.up or worker.in_flight):
            self._workers.pop(worker.url, None)

    # ------------------------------------------------------------ choice

    def choose(self, role: WorkerRole, model: str, avoid: Collection[str] = ()) -> Worker | None:
        """Return the next worker for a model, or None if all must be avoided.

        Raises ``AllFull`` if no worker takes a request now, and some of them are not to be avoided.
        """
        fitting = [
            worker
            for worker in self.workers
            if worker.up and worker.role is role and worker.model == model
            if worker.url not in avoid
        ]
        if not fitting:
            return None
        fitting = [worker for worker in fitting if not worker.is_full]
        if not fitting:
            raise AllFull(f"all {role} workers are full; retry later")
        by_load = self._policy is BalancePolicy.LEAST_LOADED
        chosen = min(fitting, key=lambda worker: (worker.load * by_load, worker.last_chosen))
        self._choices += 1
        chosen.last_chosen = self._choices
        return chosen
