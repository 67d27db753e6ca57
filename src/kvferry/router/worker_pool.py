"""The workers that a router knows, and which of them it takes next.

No input or output, and no clock but the one it is given; the watch tells it what
it has seen. A worker is used while it is *up*: it has said that it is well, and
neither a health check nor a request has failed since. One that stays silent is
*lost*, which also ends what it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvferry import KvferryError
from kvferry.router.options import MOST_MISSES, BalancePolicy


class WorkerRole(StrEnum):
    """Which half of a request a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Announced(msgspec.Struct, frozen=True):
    """A worker as it was announced; of one given by its address only that is known."""

    url: str
    part: WorkerRole
    name: str = ""


class Unwell(KvferryError):
    """A worker says of itself that it can't be used."""


class Health(msgspec.Struct, frozen=True):
    """What is read of a worker's ``/healthz``."""

    role: str
    name: str
    model: str
    running: int = 0
    waiting: int = 0
    life: str = ""
    proof: str = ""
    problem: str = ""


@dataclass(eq=False, slots=True)
class Worker:
    """One worker. ``in_flight`` are this router's requests, ``others`` those of anybody else."""

    url: str
    part: WorkerRole
    name: str
    fixed: bool
    model: str = ""
    up: bool = False
    listed: bool = True
    misses: int = 0
    problem: str = "it has not answered yet"
    in_flight: int = 0
    others: int = 0
    last_chosen: int = 0
    well_at: float = float("-inf")
    life: str = ""
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def load(self) -> int:
        """Requests that it has, as far as is known."""
        return self.in_flight + self.others

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Count a request for as long as it is under way."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def failed(self, problem: str) -> None:
        """A request could not reach it: it is left out until it says that it is well."""
        self.up, self.problem = False, problem

    def __str__(self) -> str:
        return f"{self.part} worker {self.name or self.url}"


class WorkerPool:
    """Every worker that is known, by address."""

    def __init__(
        self, policy: BalancePolicy, lost_s: float, fixed: Iterable[Announced] = ()
    ) -> None:
        self._policy = policy
        self._lost_s = lost_s
        self._choices = 0
        self._workers = {
            entry.url: Worker(entry.url, entry.part, entry.name, fixed=True) for entry in fixed
        }

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""
        return tuple(self._workers.values())

    def models(self) -> list[str]:
        """The models that decode workers have, whether they are up or not."""
        found = {worker.model for worker in self.workers if worker.part is WorkerRole.DECODE}
        return sorted(found - {""})

    # ------------------------------------------------------------ what was seen

    def hear(self, announced: Iterable[Announced]) -> None:
        """Take the discovery service's list. Who has left it stays for as long as it is up."""
        listed = {entry.url: entry for entry in announced}
        for url, entry in listed.items():
            worker = self._workers.get(url)
            if worker is None:
                self._workers[url] = Worker(url, entry.part, entry.name, fixed=False)
            elif not worker.fixed:
                worker.part, worker.name, worker.listed = entry.part, entry.name, True
        for worker in self.workers:
            if not worker.fixed and worker.url not in listed:
                worker.listed = False
                self._forget_if_gone(worker)

    def well(self, worker: Worker, health: Health, now: float) -> None:
        """It has answered a health check."""
        if health.role != worker.part:
            worker.failed(f"it is a {health.role} worker, not {worker.part}")
            return
        worker.name, worker.model, worker.life = health.name, health.model, health.life
        worker.up, worker.misses, worker.problem = True, 0, ""
        worker.others = max(0, health.running + health.waiting - worker.in_flight)
        worker.well_at = now
        worker.lost.clear()

    def missed(self, worker: Worker, problem: str, now: float, *, sure: bool) -> None:
        """It has not. Nobody listens there or it says that it is not well, or it is merely slow."""
        worker.misses += 1
        if sure or worker.misses >= MOST_MISSES:
            worker.failed(problem)
        # One that refuses may be stopping, with answers under way; silence is another matter.
        self.given_up(worker, now)
        self._forget_if_gone(worker)

    def given_up(self, worker: Worker, now: float) -> None:
        """Give it up if it has missed a check and been silent for too long."""
        if worker.misses and now >= worker.well_at + self._lost_s:
            worker.lost.set()

    def _forget_if_gone(self, worker: Worker) -> None:
        if not (worker.fixed or worker.listed or worker.up or worker.in_flight):
            self._workers.pop(worker.url, None)

    # ------------------------------------------------------------ who is next

    def choose(self, part: WorkerRole, model: str, avoid: Collection[str] = ()) -> Worker | None:
        """The next worker of a model; None if there is none but those to avoid."""
        fitting = [
            worker
            for worker in self.workers
            if worker.up and worker.part is part and worker.model == model
            if worker.url not in avoid
        ]
        if not fitting:
            return None
        by_load = self._policy is BalancePolicy.LEAST_LOADED
        chosen = min(fitting, key=lambda worker: (worker.load * by_load, worker.last_chosen))
        self._choices += 1
        chosen.last_chosen = self._choices
        return chosen
