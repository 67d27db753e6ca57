"""The holder of a prompt's beginning: names it to prefill, and takes what answers tell."""

from __future__ import annotations

import asyncio

import msgspec

from kvferry.router.adapters import EngineAdapter, instance_of
from kvferry.router.bodies import ApiCall
from kvferry.router.conversations import (
    Conversations,
    Piece,
    PrefillReport,
    PullDecision,
    pieces_of,
)
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions, replicated
from kvferry.router.upstream import AttemptOutcome, OpenResponse
from kvferry.router.worker_pool import Worker, WorkerPool


class HolderMemory:
    """A router's knowledge of holders. Belongs to its event loop."""

    def __init__(
        self,
        options: RouterOptions,
        pool: WorkerPool,
        metrics: RouterMetrics,
        adapter: EngineAdapter,
    ) -> None:
        self._is_on = options.pull.enabled and adapter.can_pull
        self._pool = pool
        self._metrics = metrics
        self._known = Conversations(options.pull)

    def pieces_of(self, call: ApiCall) -> list[Piece]:
        """Return the pieces of a request's prompt; none if holders are not used."""
        return pieces_of(call.body) if self._is_on else []

    def choose(self, pieces: list[Piece], prefill: Worker, room: int) -> str:
        """Return the holder to name to a prefill worker; empty if there is none that pays."""
        if not pieces:
            return ""
        # A draining worker still lends what it has.
        lends = [worker for worker in self._pool.workers if worker.up or worker.draining]
        up = {name for worker in lends for name in _instances(worker)}
        choice = self._known.choose(pieces, _instance(prefill, room), up)
        self._metrics.prefixes.labels(choice.decision).inc()
        return choice.holder if choice.decision is PullDecision.PULL else ""

    def take_prefill(
        self, pieces: list[Piece], worker: Worker, room: int, task: asyncio.Task[AttemptOutcome]
    ) -> None:
        """Take a prefill worker's answer, once its task has ended."""
        if task.cancelled() or task.exception() is not None:
            return
        if isinstance(outcome := task.result(), OpenResponse):
            report = _report(outcome.head)
            self._known.learn(pieces, _instance(worker, room), report)
            if report.usage is not None:
                self._metrics.count_prompt(report.usage, report.kvferry)

    def answered(
        self,
        pieces: list[Piece],
        decode: Worker,
        prefill: Worker | None,
        room: int,
        answer: bytes | int,
    ) -> None:
        """Remember who holds a prompt and its answer: a whole one, or the events of a stream."""
        if not pieces:
            return
        usage = _report(answer).usage if isinstance(answer, bytes) else None
        num_tokens = (usage.completion_tokens or 0) if usage else 0
        workers = [decode] if prefill is None else [decode, prefill]
        names = tuple(filter(None, (_instance(worker, room) for worker in workers)))
        if names:
            self._known.remember(pieces, names, answer if isinstance(answer, int) else num_tokens)
            self._metrics.remembered.set(len(self._known))


def _report(document: bytes) -> PrefillReport:
    try:
        return msgspec.json.decode(document, type=PrefillReport)
    except ValueError:
        return PrefillReport()


def _instance(worker: Worker, room: int) -> str:
    """Return the instance that has a room; empty if the router knows only the worker's URL."""
    return "" if worker.name == worker.url else instance_of(worker.name, room)


def _instances(worker: Worker) -> list[str]:
    name, count = replicated(worker.name)
    return [name] if count == 1 else [instance_of(worker.name, room) for room in range(count)]
