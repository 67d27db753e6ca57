"""Forwarding of a client's request: choose workers, send, relay the response, or try again.

``next_try`` and ``choose`` decide; ``Forwarder`` acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from kvferry import ClusterKey
from kvferry.http.api_errors import JSON, ApiError
from kvferry.router.adapters import EngineAdapter
from kvferry.router.bodies import ApiCall, new_id
from kvferry.router.conversations import Piece
from kvferry.router.first_token import Continuation, continuation
from kvferry.router.holders import HolderMemory
from kvferry.router.metrics import RouterMetrics
from kvferry.router.moving import StreamMover
from kvferry.router.options import FirstTokenFrom, OnFailure, RouterOptions
from kvferry.router.queue import RequestQueue
from kvferry.router.streams import Relayed, StreamPart, begin, end_with, relay
from kvferry.router.upstream import (
    AttemptOutcome,
    FailedAttempt,
    FaultDomain,
    OpenResponse,
    Upstream,
    cancel_and_wait,
    client_error,
    is_prefill_failure,
    new_session,
)
from kvferry.router.worker_pool import Worker, WorkerPool, WorkerRole
from kvferry.telemetry.logs.context import in_room

log = logging.getLogger("kvferry.router")

PREFILL_HEADER, DECODE_HEADER = "X-Kvferry-Prefill", "X-Kvferry-Decode"
# Retries after a worker vanished with the request. One hides a killed worker from clients; more
# would let a request that crashes workers reach all of them.
MAX_LOSSES = 1
# After a failed transfer, how long to wait for the prefill worker's own error.
EXPLAIN_S = 1.0


@dataclass(slots=True)
class AttemptState:
    """History of one request's attempts. ``pieces``: its prompt's, to find a holder by."""

    pieces: list[Piece] = field(default_factory=list)
    attempts: int = 0
    avoid: set[str] = field(default_factory=set)
    local: bool = False
    losses: int = 0
    failure: FailedAttempt | None = None
    queued_until: float = inf


class WorkerPair(NamedTuple):
    """Workers of an attempt; without a prefill worker, decode computes the prompt."""

    prefill: Worker | None
    decode: Worker


class Opened(NamedTuple):
    """A response that has begun, and the workers and the room of its attempt."""

    pair: WorkerPair
    response: OpenResponse
    room: int


class FirstTokenOpened(NamedTuple):
    """A stream whose first token came from prefill, and whose rest decode can load from a room."""

    pair: WorkerPair
    rest: Continuation
    room: int


def next_try(
    tried: AttemptState, failure: FailedAttempt, on_failure: OnFailure, max_attempts: int
) -> bool:
    """Record a failure; return whether to try again."""
    tried.failure = failure
    if failure.fault_domain is FaultDomain.REJECTED:
        return tried.attempts < max_attempts
    if failure.fault_domain is FaultDomain.REQUEST or on_failure is OnFailure.FAIL:
        return False
    tried.losses += failure.fault_domain is FaultDomain.LOST
    if tried.losses > MAX_LOSSES:
        return False
    if is_prefill_failure(failure) and on_failure is OnFailure.LOCAL:
        tried.local = True
    return tried.attempts < max_attempts


def choose(pool: WorkerPool, call: ApiCall, tried: AttemptState) -> WorkerPair:
    """Return the workers for the next attempt; raise ``ApiError`` if there are none."""
    decode = pool.choose(WorkerRole.DECODE, call.model, tried.avoid)
    if decode is None:
        raise _no_worker(tried, WorkerRole.DECODE, "start one, or wait until one is up")
    if tried.local:
        return WorkerPair(None, decode)
    prefill = pool.choose(WorkerRole.PREFILL, call.model, tried.avoid)
    if prefill is None and call.on_failure is OnFailure.RETRY and _failed_in_transfer(tried):
        # The avoided worker's ranks may have restarted by now.
        prefill = pool.choose(WorkerRole.PREFILL, call.model)
    if prefill is None and call.on_failure is not OnFailure.LOCAL:
        raise _no_worker(tried, WorkerRole.PREFILL, "start one, or allow on_failure=local")
    return WorkerPair(prefill, decode)


def _failed_in_transfer(tried: AttemptState) -> bool:
    return tried.failure is not None and tried.failure.fault_domain is FaultDomain.TRANSFER


def _no_worker(tried: AttemptState, role: WorkerRole, remedy: str) -> ApiError:
    if tried.failure is not None:
        return client_error(tried.failure)
    return ApiError(503, f"no {role} worker is up; {remedy}", code=f"no_{role}_worker")


class Forwarder:
    """Forwards clients' requests to workers, until ``close``."""

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
        self._queue = RequestQueue(options, pool, metrics)
        self._holders = HolderMemory(options, pool, metrics, adapter)
        self._background: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Cancel background tasks and close all connections."""
        await cancel_and_wait(*self._background)
        if self._session is not None:
            await self._session.close()

    async def drain(self, worker: Worker) -> FailedAttempt | None:
        """Send no new requests to a worker, and have it drain; return why it does not."""
        self._session = self._session or new_session()
        if not self._adapter.drains:
            message = f"the {worker} is drained with SIGTERM, not by the router"
            return FailedAttempt(worker, FaultDomain.REQUEST, message, 400, "unsupported")
        # First, so that no request arrives there only to be refused.
        worker.leave_out(asyncio.get_running_loop().time())
        with Upstream(self._session, self._key) as upstream:
            async with self._before(asyncio.get_running_loop().time() + self._options.check_s):
                outcome = await upstream.send(worker, "/drain", b"", stream=False)
        return outcome if isinstance(outcome, FailedAttempt) else None

    async def answer(self, request: web.Request, call: ApiCall) -> web.StreamResponse:
        """Handle one request, before its deadline."""
        self._session = self._session or new_session()
        deadline = asyncio.get_running_loop().time() + self._options.deadline_s
        with Upstream(self._session, self._key) as upstream:
            async with self._before(deadline):
                until = asyncio.get_running_loop().time() + self._options.queue_s
                tried = AttemptState(self._holders.pieces_of(call), queued_until=until)
                opened = await self._open(upstream, call, tried)
            headers = _names(opened.pair)
            if isinstance(opened, FirstTokenOpened):
                response = await begin(request, headers, {})
                relayed = await self._continue(upstream, response, opened, deadline)
            elif call.stream:
                response = await begin(request, headers, opened.response.response.headers)
                relayed = await self._relay(upstream, response, call, opened, tried, deadline)
            else:
                self._remember(tried, opened, opened.pair.decode, opened.response.head)
                return web.Response(body=opened.response.head, content_type=JSON, headers=headers)
            self._remember(tried, opened, *relayed)
            return response

    async def _relay(
        self,
        upstream: Upstream,
        response: web.StreamResponse,
        call: ApiCall,
        opened: Opened,
        tried: AttemptState,
        deadline: float,
    ) -> Relayed:
        if not self._adapter.can_move(call):
            return await relay(response, StreamPart(opened.response), deadline)
        mover = StreamMover(
            *(call, self._pool, self._adapter, self._metrics),
            send=partial(self._send, upstream),
            begin_anew=partial(self._begin_anew, upstream, tried),
        )
        try:
            return await relay(response, mover.part(opened.response), deadline, mover.following)
        finally:
            await mover.close()

    def _remember(
        self,
        tried: AttemptState,
        opened: Opened | FirstTokenOpened,
        decode: Worker,
        answer: bytes | int,
    ) -> None:
        """Remember which workers hold the prompt and the answer."""
        self._holders.answered(tried.pieces, decode, opened.pair.prefill, opened.room, answer)

    @contextlib.asynccontextmanager
    async def _before(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            seconds = f"{self._options.deadline_s:g} s"
            raise ApiError(504, f"no response came within {seconds}", code="deadline") from None

    async def _continue(
        self,
        upstream: Upstream,
        response: web.StreamResponse,
        first: FirstTokenOpened,
        deadline: float,
    ) -> Relayed:
        """Send the first token, then the rest from decode."""
        await response.write(first.rest.head)
        try:
            async with self._before(deadline):
                opened = await self._open_rest(upstream, first)
        except ApiError as error:
            await end_with(response, error)
            return Relayed(first.pair.decode, 0)
        return await relay(response, StreamPart(opened, first.rest.rewrite), deadline)

    async def _open_rest(self, upstream: Upstream, first: FirstTokenOpened) -> OpenResponse:
        """Ask the decode worker of the pair; if it fails, begin anew with the longer prompt."""
        assert first.pair.prefill is not None
        until = asyncio.get_running_loop().time() + self._options.queue_s
        rest, tried = first.rest, AttemptState(attempts=1, queued_until=until)
        body = self._adapter.for_rest(
            rest, first.room, first.pair.prefill.name, self._options.room_s
        )
        with first.pair.decode.count_request():
            sent = await self._send(upstream, first.pair.decode, rest.call, body)
        outcome = self._adapter.classify(sent)
        self._metrics.attempt(outcome)
        if isinstance(outcome, OpenResponse):
            return outcome
        self._record_failure(rest.call, tried, first.pair, outcome)
        opened = await self._open(upstream, rest.call, tried, from_prefill=False)
        assert not isinstance(opened, FirstTokenOpened)
        return opened.response

    async def _begin_anew(
        self, upstream: Upstream, tried: AttemptState, call: ApiCall, failure: FailedAttempt
    ) -> OpenResponse:
        """Begin a call anew that has failed at a decode worker; raise if no attempt is left."""
        tried.attempts += 1
        tried.queued_until = asyncio.get_running_loop().time() + self._options.queue_s
        self._metrics.attempt(failure)
        self._record_failure(call, tried, WorkerPair(None, failure.worker), failure)
        opened = await self._open(upstream, call, tried, from_prefill=False)
        assert not isinstance(opened, FirstTokenOpened)
        return opened.response

    async def _open(
        self,
        upstream: Upstream,
        call: ApiCall,
        tried: AttemptState,
        *,
        from_prefill: bool = True,
    ) -> Opened | FirstTokenOpened:
        """Try until a response begins; raise ``ApiError`` if no attempt is left.

        ``from_prefill``: the first token may come from prefill.
        """
        early = (
            from_prefill
            and self._options.first_token is FirstTokenFrom.PREFILL
            and self._adapter.may_continue(call)
        )
        while True:
            tried.local = tried.local or not self._adapter.can_split(call)
            next_pair = partial(choose, self._pool, call, tried)
            pair = await self._queue.admit(next_pair, tried.queued_until)
            if pair.prefill is None and not tried.local:
                log.warning("no-prefill-worker recomputed-by=%s %s", pair.decode.url, self._down())
            room = new_id()
            with pair.decode.count_request():
                if early and pair.prefill is not None:
                    outcome = await self._attempt_in_turn(upstream, call, tried, pair, room)
                else:
                    outcome = await self._attempt(upstream, call, tried, pair, room)
            if isinstance(outcome, FirstTokenOpened):
                self._metrics.first_tokens.inc()
                return outcome
            self._metrics.attempt(outcome)
            if isinstance(outcome, OpenResponse):
                return Opened(pair, outcome, room)
            if outcome.fault_domain is FaultDomain.FULL:
                # Other routers have filled it. This request waits, and has lost no attempt.
                outcome.worker.refuses = True
                continue
            tried.attempts += 1
            self._record_failure(call, tried, pair, outcome)

    def _down(self) -> str:
        """Return why prefill workers are not used, for the log."""
        prefills = (one for one in self._pool.workers if one.role is WorkerRole.PREFILL)
        return " ".join(f"{one.name or one.url}={one.problem!r}" for one in prefills)

    def _record_failure(
        self, call: ApiCall, tried: AttemptState, pair: WorkerPair, failure: FailedAttempt
    ) -> None:
        """Take a failed attempt; raise ``ApiError`` if it was the last."""
        log.log(
            # An invalid request is the client's mistake.
            logging.INFO if failure.fault_domain is FaultDomain.REQUEST else logging.WARNING,
            "attempt-failed worker=%s fault_domain=%s error=%r",
            failure.worker.url,
            failure.fault_domain.name,
            failure.message,
        )
        tried.avoid.add(_worker_at_fault(pair, failure).url)
        if not next_try(tried, failure, call.on_failure, self._options.attempts):
            raise client_error(failure)

    def _ask_prefill(
        self,
        call: ApiCall,
        tried: AttemptState,
        prefill: Worker,
        room: int,
        body_for: Callable[[ApiCall, int, float, str], bytes],
    ) -> asyncio.Task[AttemptOutcome]:
        """Send a prefill worker its request, with the holder of the prompt's beginning."""
        holder = self._holders.choose(tried.pieces, prefill, room)
        body = body_for(call, room, self._options.room_s, holder)
        headers = self._adapter.headers(prefill.name, room)
        task = asyncio.create_task(self._prefill(prefill, call, body, headers))
        task.add_done_callback(partial(self._holders.take_prefill, tried.pieces, prefill, room))
        return task

    async def _attempt_in_turn(
        self, upstream: Upstream, call: ApiCall, tried: AttemptState, pair: WorkerPair, room: int
    ) -> AttemptOutcome | FirstTokenOpened:
        """Ask prefill for the first token; if it can't begin the stream, ask decode for all."""
        adapter, prefill, room_s = self._adapter, pair.prefill, self._options.room_s
        assert prefill is not None
        in_room(room)
        first = await self._ask_prefill(call, tried, prefill, room, adapter.for_first_token)
        if isinstance(first, FailedAttempt):
            return adapter.classify(first)
        if (rest := continuation(call, first.head, room)) is not None:
            return FirstTokenOpened(pair, rest, room)
        answer = adapter.for_decode(call, room, prefill.name, room_s)
        return adapter.classify(await self._send(upstream, pair.decode, call, answer))

    async def _attempt(
        self, upstream: Upstream, call: ApiCall, tried: AttemptState, pair: WorkerPair, room: int
    ) -> AttemptOutcome:
        adapter = self._adapter
        if pair.prefill is None:
            in_room(None)
            return await self._send(upstream, pair.decode, call, adapter.whole(call))
        in_room(room)
        answer = adapter.for_decode(call, room, pair.prefill.name, self._options.room_s)
        first = self._ask_prefill(call, tried, pair.prefill, room, adapter.for_prefill)
        second = asyncio.create_task(self._send(upstream, pair.decode, call, answer))
        outcome: AttemptOutcome | None = None
        try:
            outcome = adapter.classify(await _decisive_outcome(first, second))
            return outcome
        finally:
            if isinstance(outcome, OpenResponse):
                # Prefill has sent the cache; its response is not needed.
                self._keep_running(first)
            else:
                await cancel_and_wait(first, second)

    def _keep_running(self, task: asyncio.Task[Any]) -> None:
        """Let a task finish in the background; it has a timeout."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send(
        self, upstream: Upstream, worker: Worker, call: ApiCall, body: bytes
    ) -> AttemptOutcome:
        """Send a decode worker's request."""
        num_events = self._adapter.num_events(call)
        sent = await upstream.send(
            *(worker, call.path, body), stream=call.stream, num_events=num_events
        )
        return self._unless_rejected(sent)

    async def _prefill(
        self, worker: Worker, call: ApiCall, body: bytes, headers: dict[str, str]
    ) -> AttemptOutcome:
        assert self._session is not None
        try:
            async with asyncio.timeout(self._options.room_s):
                with Upstream(self._session, self._key) as upstream, worker.count_request():
                    sent = await upstream.send(
                        *(worker, call.path, body), stream=False, headers=headers
                    )
                    return self._unless_rejected(sent)
        except TimeoutError:
            message = f"the {worker} did not answer within {self._options.room_s:g} s"
            return FailedAttempt(worker, FaultDomain.WORKER, message, 504, "deadline")

    def _unless_rejected(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Leave out a worker that accepts no requests any more, and try another."""
        if not self._adapter.rejects(outcome):
            return outcome
        worker = outcome.worker
        worker.leave_out(asyncio.get_running_loop().time())
        message = f"the {worker} accepts no new requests"
        return FailedAttempt(worker, FaultDomain.REJECTED, message, 503, "worker_rejects")


async def _decisive_outcome(
    first: asyncio.Task[AttemptOutcome],
    second: asyncio.Task[AttemptOutcome],
) -> AttemptOutcome:
    """Return decode's outcome, or prefill's if prefill fails first.

    After a failed transfer, prefer prefill's own error: it names the cause.
    """
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    if not second.done() and isinstance(first.result(), FailedAttempt):
        return first.result()
    outcome = await second
    if isinstance(outcome, FailedAttempt) and outcome.fault_domain is FaultDomain.TRANSFER:
        await asyncio.wait({first}, timeout=EXPLAIN_S)
        if first.done() and isinstance(first.result(), FailedAttempt):
            return first.result()
    return outcome


def _worker_at_fault(pair: WorkerPair, failure: FailedAttempt) -> Worker:
    """Return the worker that the next attempt avoids."""
    return pair.prefill if is_prefill_failure(failure) and pair.prefill else failure.worker


def _names(pair: WorkerPair) -> dict[str, str]:
    """Return the headers that name the workers."""
    names = {DECODE_HEADER: pair.decode.name}
    return names if pair.prefill is None else names | {PREFILL_HEADER: pair.prefill.name}
