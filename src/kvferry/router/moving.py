"""Streams that move: an answer goes on at another worker after the tokens that the client has.

A worker reports the token ids of each event, if it is asked to. The router keeps them, and takes
them out again for a client that has not asked. Another worker gets the client's request with these
tokens. It tokenizes the prompt as the first one did and sends the rest: its sampling depends only
on seed and position, and from the tokens it derives which text is held back. So the client gets
the stream that the first worker would have sent.

The other worker first pulls what is computed, while the first one goes on. Then the first one is
left between two events, and the other one computes the few tokens that came since. The first one is
closed only when the other one has begun. Until then the stream can go on where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvferry.http.sse import ServerEvent
from kvferry.router.adapters import EngineAdapter
from kvferry.router.bodies import ANSWERED, REPORT, STREAM_FIELDS, ApiCall
from kvferry.router.metrics import RouterMetrics
from kvferry.router.streams import StreamPart
from kvferry.router.upstream import (
    AttemptOutcome,
    FailedAttempt,
    FaultDomain,
    OpenResponse,
    cancel_and_wait,
    client_error,
    failed_attempt,
)
from kvferry.router.worker_pool import AllFull, Worker, WorkerPool, WorkerRole
from kvferry.telemetry.logs.context import in_room

log = logging.getLogger("kvferry.router")

LIMITS = ("max_tokens", "max_completion_tokens")

# Time for another worker to begin the rest of a stream.
MOVE_S = 10.0

Send = Callable[[Worker, ApiCall, bytes], Awaitable[AttemptOutcome]]
# Takes a failure and begins the call anew; raises ``ApiError`` if no attempt is left.
BeginAnew = Callable[[ApiCall, FailedAttempt], Awaitable[OpenResponse]]


class StreamedAnswer:
    """The answer that a client has received so far, from one or more workers. Pure.

    ``failure`` is the error document with which a worker has ended its part.
    """

    def __init__(self, call: ApiCall) -> None:
        self._call = call
        self._is_asked = bool(call.body.get(REPORT))
        self._tokens: list[int] = []
        self._about: dict[str, Any] = {}
        self._is_known = True
        self._finished = False
        self.failure = b""

    @property
    def can_move(self) -> bool:
        """Whether it has begun, goes on, and all its tokens are known."""
        return bool(self._tokens) and self._is_known and not self._finished

    @property
    def rest(self) -> ApiCall:
        """The request for the rest of the answer."""
        body = self._call.body
        answered = [*(body.get(ANSWERED) or ()), *self._tokens]
        return msgspec.structs.replace(self._call, body=body | {ANSWERED: answered})

    @property
    def next_token(self) -> ApiCall:
        """The request for the answer's next token alone."""
        rest = self.rest
        body = {key: value for key, value in rest.body.items() if key not in STREAM_FIELDS}
        body |= dict.fromkeys(LIMITS, len(rest.body[ANSWERED]) + 1)
        return msgspec.structs.replace(rest, stream=False, body=body)

    def rewrite(self, event: ServerEvent) -> bytes:
        """Take an event of a worker; return it as part of the client's stream.

        An error is kept back while another worker could send the rest.
        """
        if event.data is None or not event.data.startswith("{"):
            return event.raw
        chunk = msgspec.json.decode(event.data, type=dict[str, Any])
        if "choices" not in chunk:
            self.failure = event.data.encode() if self.can_move and "error" in chunk else b""
            return b"" if self.failure else event.raw
        about = {key: chunk[key] for key in ("id", "created")}
        self._about = self._about or about
        reports = any("token_ids" in choice for choice in chunk["choices"])
        choices = [choice for choice in chunk["choices"] if self._take(choice)]
        if about == self._about and (self._is_asked or not reports):
            return event.raw
        chunk |= self._about | {"choices": choices}
        is_empty = not (choices or chunk.get("usage"))
        return b"" if is_empty else b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _take(self, choice: dict[str, Any]) -> bool:
        """Record a choice's tokens; return whether the client is to see the choice."""
        finish = choice.get("finish_reason")
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        self._finished = self._finished or finish is not None
        if (tokens := choice.get("token_ids")) is None:
            # Only a chat's role has none.
            self._is_known = self._is_known and not text
            return True
        self._tokens += tokens
        if not self._is_asked:
            del choice["token_ids"]
        return bool(self._is_asked or text or finish)


class StreamMover:
    """Moves one client's stream when its worker drains or fails.

    ``send`` asks a decode worker, ``begin_anew`` any workers.
    """

    def __init__(
        self,
        call: ApiCall,
        pool: WorkerPool,
        adapter: EngineAdapter,
        metrics: RouterMetrics,
        send: Send,
        begin_anew: BeginAnew,
    ) -> None:
        self._model = call.model
        self._answer = StreamedAnswer(call)
        self._pool = pool
        self._adapter = adapter
        self._metrics = metrics
        self._send = send
        self._begin_anew = begin_anew
        # Workers that could not go on with this stream.
        self._avoid: set[str] = set()
        self._target: Worker | None = None
        self._pull: asyncio.Task[bool] | None = None

    async def close(self) -> None:
        """Cancel a pull that nobody needs any more."""
        if self._pull is not None:
            await cancel_and_wait(self._pull)

    def part(self, opened: OpenResponse) -> StreamPart:
        """Return a part that is left once its worker drains and another one has pulled."""

        def leaves() -> bool:
            drains = opened.worker.draining and self._answer.can_move
            return drains and self._has_pulled(opened.worker)

        return StreamPart(opened, self._answer.rewrite, leaves)

    def _has_pulled(self, source: Worker) -> bool:
        """Return whether another worker has pulled from this one; if none does yet, let one."""
        if self._pull is None:
            with contextlib.suppress(AllFull):
                self._target = self._pool.choose(WorkerRole.DECODE, self._model, self._avoid)
                if self._target is not None:
                    self._pull = asyncio.create_task(self._pull_to(self._target, source))
        elif self._pull.done():
            pulled, self._pull = self._pull.result(), None
            return pulled
        return False

    async def _pull_to(self, target: Worker, source: Worker) -> bool:
        """Have a worker pull what another has computed, and compute one token."""
        call = self._answer.next_token
        body = self._adapter.for_move(call, source.name)
        return await self._ask(target, call, body) is not None

    async def _ask(self, target: Worker, call: ApiCall, body: bytes) -> OpenResponse | None:
        """Send a request; if it fails, do not ask this worker again."""
        in_room(None)
        with target.count_request():
            outcome = await self._send(target, call, body)
        self._metrics.attempt(outcome)
        if isinstance(outcome, OpenResponse):
            return outcome
        log.warning("not-moved to=%s error=%r", target.url, outcome.message)
        if outcome.fault_domain is FaultDomain.FULL:
            target.refuses = True
        else:
            self._avoid.add(target.url)
        return None

    async def following(self, part: StreamPart, failure: FailedAttempt | None) -> StreamPart | None:
        """Return the part with which the stream goes on; see ``streams.Following``."""
        answer = self._answer
        if answer.failure:
            failure = failed_attempt(part.worker, 500, answer.failure)
        elif failure is None and part.ended:
            return None
        if failure is not None and not answer.can_move:
            raise client_error(failure)
        began, reason = asyncio.get_running_loop().time(), "failure" if failure else "drain"
        if failure is not None:
            opened = await self._begin_anew(answer.rest, failure)
        elif (moved := await self._move(part.worker)) is not None:
            opened = moved
        else:
            return part
        pause_s = asyncio.get_running_loop().time() - began
        self._metrics.moves.labels(reason).observe(pause_s)
        log.info(
            "moved reason=%s from=%s to=%s pause_s=%.3f",
            *(reason, part.worker.url, opened.worker.url, pause_s),
        )
        # So that its worker stops computing.
        part.opened.response.close()
        answer.failure = b""
        return self.part(opened)

    async def _move(self, source: Worker) -> OpenResponse | None:
        """Ask the worker that has pulled for the rest; return None if it does not begin."""
        assert self._target is not None
        rest = self._answer.rest
        try:
            with source.count_request():
                async with asyncio.timeout(MOVE_S):
                    return await self._ask(self._target, rest, self._adapter.whole(rest))
        except TimeoutError:
            log.warning("not-moved to=%s error=%r", self._target.url, "it does not begin")
            self._avoid.add(self._target.url)
            return None
