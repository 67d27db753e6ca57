"""The forwarder of a client's request: choose workers, ask them, pass the answer on, or try again.

``next_try`` and ``choose`` decide; ``Forwarder`` acts.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from kvferry import ClusterKey
from kvferry.http.api_errors import JSON, ApiError
from kvferry.router.adapters import EngineAdapter
from kvferry.router.bodies import ClientAsk, new_id
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import OnFailure, RouterOptions
from kvferry.router.streams import relay
from kvferry.router.upstream import (
    Failed,
    FaultDomain,
    Opened,
    Upstream,
    ended,
    is_prefills,
    new_session,
)
from kvferry.router.worker_pool import Worker, WorkerPool, WorkerRole
from kvferry.telemetry.logs.context import in_room

log = logging.getLogger("kvferry.router")

PREFILL_HEADER, DECODE_HEADER = "X-Kvferry-Prefill", "X-Kvferry-Decode"
# How often a request is tried again after a worker vanished with it. Once, so that a killed worker
# costs its requests nothing; no more, so that a request that ends workers does not go on to all.
MOST_LOSSES = 1
# How long a failed transfer waits for its prefill worker's own account of what happened.
EXPLAIN_S = 1.0


@dataclass(slots=True)
class TriedWorkers:
    """What one request has been through."""

    attempts: int = 0
    avoid: set[str] = field(default_factory=set)
    local: bool = False
    losses: int = 0
    failure: Failed | None = None


class WorkerPair(NamedTuple):
    """Who answers; without a prefill worker, decode does it all."""

    prefill: Worker | None
    decode: Worker


def next_try(
    tried: TriedWorkers, failure: Failed, on_failure: OnFailure, most_attempts: int
) -> bool:
    """Take note of a failure; say whether to try again."""
    tried.failure = failure
    if failure.fault_domain is FaultDomain.REQUEST or on_failure is OnFailure.FAIL:
        return False
    tried.losses += failure.fault_domain is FaultDomain.LOST
    if tried.losses > MOST_LOSSES:
        return False
    if is_prefills(failure) and on_failure is OnFailure.LOCAL:
        tried.local = True
    return tried.attempts < most_attempts


def choose(pool: WorkerPool, ask: ClientAsk, tried: TriedWorkers) -> WorkerPair:
    """The next pair, or an ``ApiError`` that says why there is none."""
    decode = pool.choose(WorkerRole.DECODE, ask.model, tried.avoid)
    if decode is None:
        raise _no_worker(tried, WorkerRole.DECODE, "start one, or wait until one is up")
    if tried.local:
        return WorkerPair(None, decode)
    prefill = pool.choose(WorkerRole.PREFILL, ask.model, tried.avoid)
    if prefill is None and ask.on_failure is OnFailure.RETRY and _lost_the_cache(tried):
        # Its ranks may have just restarted, and the next room meets the new ones.
        prefill = pool.choose(WorkerRole.PREFILL, ask.model)
    if prefill is None and ask.on_failure is not OnFailure.LOCAL:
        raise _no_worker(tried, WorkerRole.PREFILL, "start one, or allow on_failure=local")
    return WorkerPair(prefill, decode)


def _lost_the_cache(tried: TriedWorkers) -> bool:
    return tried.failure is not None and tried.failure.fault_domain is FaultDomain.TRANSFER


def _no_worker(tried: TriedWorkers, part: WorkerRole, remedy: str) -> ApiError:
    if tried.failure is not None:
        return given_up(tried.failure)
    return ApiError(503, f"no {part} worker is up; {remedy}", code=f"no_{part}_worker")


def given_up(failure: Failed) -> ApiError:
    """What a client is told of the last failure."""
    return ApiError(failure.status, failure.message, code=failure.code, document=failure.document)


class Forwarder:
    """Answers clients' requests with the help of workers, until ``close``."""

    def __init__(
        self,
        options: RouterOptions,
        pool: WorkerPool,
        metrics: RouterMetrics,
        adapter: EngineAdapter,
        key: ClusterKey | None = None,
    ) -> None:
        self._options = options
        self._key = key
        self._adapter = adapter
        self._pool = pool
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None
        self._stragglers: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """End what is under way and close every connection."""
        await ended(*self._stragglers)
        if self._session is not None:
            await self._session.close()

    async def answer(self, request: web.Request, ask: ClientAsk) -> web.StreamResponse:
        """The whole way of one request, before its deadline."""
        self._session = self._session or new_session()
        deadline = asyncio.get_running_loop().time() + self._options.deadline_s
        with Upstream(self._session, self._key) as upstream:
            try:
                async with asyncio.timeout_at(deadline):
                    pair, opened = await self._open(upstream, ask)
            except TimeoutError:
                seconds = f"{self._options.deadline_s:g} s"
                raise ApiError(504, f"no answer came within {seconds}", code="deadline") from None
            return await _pass_on(request, ask, pair, opened, deadline)

    async def _open(self, upstream: Upstream, ask: ClientAsk) -> tuple[WorkerPair, Opened]:
        """Try until an answer begins; an ``ApiError`` when there is nothing left to try."""
        tried = TriedWorkers()
        while True:
            tried.local = tried.local or not self._adapter.splits(ask)
            pair = choose(self._pool, ask, tried)
            tried.attempts += 1
            outcome = await self._attempt(upstream, ask, pair)
            self._metrics.attempt(outcome)
            if isinstance(outcome, Opened):
                return pair, outcome
            log.log(
                # A request that a worker calls wrong is its client's mistake.
                logging.INFO if outcome.fault_domain is FaultDomain.REQUEST else logging.WARNING,
                "attempt-failed worker=%s fault_domain=%s message=%r",
                outcome.worker.url,
                outcome.fault_domain.name,
                outcome.message,
            )
            tried.avoid.add(_at_fault(pair, outcome).url)
            if not next_try(tried, outcome, ask.on_failure, self._options.attempts):
                raise given_up(outcome)

    async def _attempt(
        self, upstream: Upstream, ask: ClientAsk, pair: WorkerPair
    ) -> Opened | Failed:
        adapter = self._adapter
        if pair.prefill is None:
            in_room(None)
            return await upstream.ask(pair.decode, ask.path, adapter.whole(ask), stream=ask.stream)
        room, room_s = new_id(), self._options.room_s
        in_room(room)
        prompt = adapter.for_prefill(ask, room, room_s)
        answer = adapter.for_decode(ask, room, pair.prefill.name, room_s)
        headers = adapter.headers(pair.prefill.name, room)
        first = asyncio.create_task(self._prefill(pair.prefill, ask.path, prompt, headers))
        second = asyncio.create_task(upstream.ask(pair.decode, ask.path, answer, stream=ask.stream))
        outcome: Opened | Failed | None = None
        try:
            outcome = adapter.judged(await _decided(first, second))
            return outcome
        finally:
            if isinstance(outcome, Opened):
                # Prefill has done its work and is about to say so, which nobody waits for.
                self._later(first)
            else:
                await ended(first, second)
                if adapter.gives_up:
                    self._later(asyncio.create_task(upstream.give_up(pair.prefill, room)))

    def _later(self, task: asyncio.Task[Any]) -> None:
        """Let a task go on by itself; it is bounded in time."""
        self._stragglers.add(task)
        task.add_done_callback(self._stragglers.discard)

    async def _prefill(
        self, worker: Worker, path: str, body: bytes, headers: dict[str, str]
    ) -> Opened | Failed:
        assert self._session is not None
        try:
            async with asyncio.timeout(self._options.room_s):
                with Upstream(self._session, self._key) as upstream:
                    return await upstream.ask(worker, path, body, stream=False, headers=headers)
        except TimeoutError:
            message = f"the {worker} did not answer within {self._options.room_s:g} s"
            return Failed(worker, FaultDomain.WORKER, message, 504, "deadline")


async def _decided(
    first: asyncio.Task[Opened | Failed], second: asyncio.Task[Opened | Failed]
) -> Opened | Failed:
    """Decode's outcome, or prefill's if that fails while decode still waits for it.

    Of a transfer that failed because prefill did, prefill knows the cause.
    """
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    if not second.done() and isinstance(first.result(), Failed):
        return first.result()
    outcome = await second
    if isinstance(outcome, Failed) and outcome.fault_domain is FaultDomain.TRANSFER:
        await asyncio.wait({first}, timeout=EXPLAIN_S)
        if first.done() and isinstance(first.result(), Failed):
            return first.result()
    return outcome


def _at_fault(pair: WorkerPair, failure: Failed) -> Worker:
    """Whom the next attempt does without."""
    return pair.prefill if is_prefills(failure) and pair.prefill else failure.worker


async def _pass_on(
    request: web.Request, ask: ClientAsk, pair: WorkerPair, opened: Opened, deadline: float
) -> web.StreamResponse:
    headers = {DECODE_HEADER: pair.decode.name}
    if pair.prefill is not None:
        headers[PREFILL_HEADER] = pair.prefill.name
    if ask.stream:
        return await relay(request, opened, headers, deadline)
    return web.Response(body=opened.head, content_type=JSON, headers=headers)
