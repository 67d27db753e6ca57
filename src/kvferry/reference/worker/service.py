"""The engine behind the API: takes jobs, steps the engine, and reports what becomes of them.

Everything here runs on the API's event loop but the engine itself, which has a thread of its
own; jobs act on the engine only between two steps. ``rooms.py`` has the rooms of all ranks.

    prefill:  begin: open ─▶ offered: queue ─▶ chunks are pushed ─▶ first token: answered
                                                                 └▶ released: free
    decode:   queue ─▶ admitted: receive ─▶ done on all ranks: decode goes on
                                      └▶ failed: abort ─▶ released: free

If a request names a holder of its prefix, ``queue`` pulls the prefix first (``prefixes.py``).
While a room is open the ranks are polled even if there is nothing to compute: often at first,
then less and less often, so that waiting costs little on a small host.

If a rank is lost or a step raises, every job is told, the engine is closed, and ``died`` has the
reason. Jobs of the failing step get another code than the rest: they may be the cause, so a
router must not send them to the next worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

import msgspec

from kvferry import Failure, KvferryError, RankAgreement, Room, Status, digest_of
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import Admitted, EngineRequest, Noted, Produced, SampleFailed
from kvferry.reference.ranks.processes import RankBroke, RankLost
from kvferry.reference.transfer.extensions import (
    DeclineCommand,
    FirstTokenNote,
    OpenCommand,
    ReceiveCommand,
    RoomExtension,
    encode,
)
from kvferry.reference.worker.prefixes import PrefixPulls
from kvferry.reference.worker.rooms import EngineRooms
from kvferry.router.worker_pool import WorkerRole
from kvferry.telemetry.logs.context import current

log = logging.getLogger(__name__)

# Between two steps while nothing happens.
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.02
# A room whose time is over is still opened, and fails by its deadline like any other.
LEAST_S = 0.001
STOP_S = 30.0


class Ticket(NamedTuple):
    """The room in which a request's cache travels. Only decode needs the prefill instance."""

    room: Room
    prefill: str = ""


class Trouble(Enum):
    """Why a job has no answer: the status and the code of its response.

    FULL: the worker has as many jobs as it takes. DRAINING: it takes no more, and ends after those
    that it has.
    ENDED: the worker ends, unrelated to this job. LOST: a rank was lost in a step that ran
    this job. BROKE_WORKER: a step that ran this job raised an exception. SAMPLING: no token
    could be chosen for this job; the worker goes on.
    """

    INVALID = (400, None)
    FULL = (429, "worker_full")
    DRAINING = (503, "worker_draining")
    TRANSFER = (503, "kv_transfer_failed")
    ENDED = (503, "worker_ended")
    LOST = (503, "worker_lost")
    BROKE_WORKER = (500, "request_broke_worker")
    SAMPLING = (500, "sampling_failed")


class JobFailed(NamedTuple):
    """There is no answer, or no more of it."""

    trouble: Trouble
    message: str


@dataclass(slots=True, eq=False, kw_only=True)
class ServeJob:
    """One request: what it asks for, and what has become of it.

    ``ticket`` is None if the whole request is computed here. ``holder`` names an instance that may
    have a prefix of it. ``queued``: the engine has the request, which on prefill waits for decode's
    pages. ``answered``: nobody waits for more. ``prefix`` counts the prompt's tokens that were
    cached here, with the pulled ones, and ``cached`` those that no worker computed for this
    request. ``report`` is how its cache came here. ``trace`` is the caller's request id and trace.
    """

    request: EngineRequest
    transfer_deadline: float
    ticket: Ticket | None = None
    holder: str = ""
    is_chat: bool = False
    streams: bool = False
    wants_usage: bool = False
    wants_token_ids: bool = False
    report: dict[str, object] = field(default_factory=dict)
    admitted_at: float | None = None
    prefix: int = 0
    cached: int = 0
    queued: bool = False
    answered: bool = False
    trace: tuple[str, str] = field(default_factory=current)
    events: asyncio.Queue[Produced | JobFailed] = field(default_factory=asyncio.Queue)

    def send(self, event: Produced | JobFailed) -> None:
        """Pass an event to the caller, unless nobody waits for it."""
        if not self.answered:
            self.answered = isinstance(event, JobFailed) or event.finish is not None
            self.events.put_nowait(event)

    def fail(self, trouble: Trouble, message: str) -> None:
        """Report that no answer comes."""
        self.send(JobFailed(trouble, message))


class EngineService:
    """An engine and its jobs, until every rank has released their pages.

    ``make`` is called in the engine's thread. ``name`` is the worker's. Belongs to one event loop.
    """

    def __init__(self, make: Callable[[], Engine], name: str, role: WorkerRole) -> None:
        self.jobs: dict[str, ServeJob] = {}
        # Done when no more steps are made: with None, or with what stopped them.
        self.died: Future[BaseException | None] = Future()
        self._make = make
        self._name = name
        self._is_prefill = role is WorkerRole.PREFILL
        self._thread = ThreadPoolExecutor(1, "kvferry-engine")
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.is_draining = False
        # Set while draining, once nobody waits for anything.
        self._quiet = asyncio.Event()
        self._num_callers = 0
        # To do between two steps.
        self._calls: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._pause_s = MIN_PAUSE_S

    # ------------------------------------------------------------ for the API

    async def start(self) -> Engine:
        """Make the engine and begin to take jobs."""
        self._here = asyncio.get_running_loop()
        self._engine = engine = await self._here.run_in_executor(self._thread, self._make)
        self._rooms = EngineRooms(engine.layout.num_ranks, engine.post)

        def soon(call: Callable[[], None]) -> None:
            """Have ``call`` made between two steps. For any thread."""
            self._here.call_soon_threadsafe(self._soon, call)

        self._prefixes = PrefixPulls(self._name, engine, self._rooms, soon)
        extension = engine.ranks.worker.extension
        self._extension = extension if isinstance(extension, RoomExtension) else None
        if self._extension is not None:
            self._extension.on_news = self._look_soon
            if engine.options.prefix_cache and self._extension.source is not None:
                self._extension.source.on_pull(self._prefixes.holds)
        layout, (group,) = engine.layout, engine.layout.spec.groups
        units = sum(len(layout.rank_shards(rank)[0].units) for rank in range(layout.num_ranks))
        # What all ranks together keep of one token.
        self._token_bytes = units * len(group.layers) * group.unit_bytes
        self._task = asyncio.create_task(self._run())
        return engine

    def submit(self, job: ServeJob) -> None:
        """Begin a job, or refuse it at once. The caller must call ``cancel`` when it leaves."""
        self._num_callers += 1
        if self.died.done():
            job.fail(Trouble.ENDED, "this worker has ended; ask another one")
        elif self.is_draining:
            job.fail(Trouble.DRAINING, "this worker takes no new requests; ask another one")
            self._soon(partial(self._decline, job))
        elif problem := self._overload(job):
            job.fail(Trouble.FULL, problem)
            self._soon(partial(self._decline, job))
        else:
            self.jobs[job.request.id] = job
            self._soon(partial(self._begin, job))

    @property
    def _in_flight_tokens(self) -> int:
        return sum(job.request.reserved_tokens for job in self.jobs.values())

    def _overload(self, job: ServeJob) -> str:
        """Return why a job cannot be taken beside those that are here; empty if it can."""
        options, num_jobs, num_tokens = self._engine.options, len(self.jobs), self._in_flight_tokens
        wanted = num_tokens + job.request.reserved_tokens
        if num_jobs < options.in_flight_limit and (
            wanted <= options.in_flight_token_limit or not num_jobs
        ):
            return ""
        return (
            f"this worker has {num_jobs} requests of {num_tokens} tokens, and takes "
            f"{options.in_flight_limit} of {options.in_flight_token_limit}; retry later"
        )

    def _decline(self, job: ServeJob) -> None:
        """Tell prefill that decode has refused a job, so that prefill does not compute for it."""
        ticket = job.ticket
        if ticket is None or self._is_prefill:
            return
        left_s = max(job.transfer_deadline - time.monotonic(), LEAST_S)
        self._engine.post(encode(DeclineCommand(ticket.room, ticket.prefill, left_s)))

    def cancel(self, job: ServeJob) -> None:
        """Stop a job whose caller has left, unless it was answered."""
        self._num_callers -= 1
        self._soon(partial(self._fail, job, Trouble.ENDED, "the caller has left"))

    def state(self) -> dict[str, object]:
        """Return the engine's load, as documented for ``/healthz``."""
        scheduler = self._engine.scheduler
        blocks = scheduler.blocks
        return {
            "running": len(scheduler.active),
            "waiting": len(scheduler.waiting) + sum(not one.queued for one in self.jobs.values()),
            "rooms": len(self._rooms),
            "max_in_flight": self._engine.options.in_flight_limit,
            "in_flight_tokens": self._in_flight_tokens,
            "max_in_flight_tokens": self._engine.options.in_flight_token_limit,
            "free_tokens": blocks.num_available * blocks.page_tokens,
            "used_pages": blocks.num_used,
            "carried_bytes": self._rooms.carried,
            "pulled_tokens": self._prefixes.pulled_tokens,
            "lent_tokens": self._prefixes.lent_tokens,
            "links": self._extension.links if self._extension else {},
        }

    async def drain(self) -> None:
        """Refuse new jobs; return once the others have ended and no transfer touches a page.

        Until then others can still pull what is cached.
        """
        self.is_draining = True
        self._wake.set()
        await self._quiet.wait()

    async def stop(self) -> None:
        """End every job, the engine and its ranks. Idempotent."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STOP_S)

    def _soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake.set()

    def _look_soon(self) -> None:
        """Poll the ranks soon: a room has news. For any thread."""
        self._pause_s = MIN_PAUSE_S
        self._here.call_soon_threadsafe(self._wake.set)

    # ------------------------------------------------------------ steps

    async def _run(self) -> None:
        reason: BaseException | None = None
        try:
            while not self._is_stopping:
                await self._step()
        except RankLost as error:
            log.error("engine-lost reason=%r", str(error))
            reason = error
        except Exception as error:
            log.exception("engine-broken")
            reason = error
        self._run_calls()
        self.died.set_result(reason)
        for job in self.jobs.values():
            self._tell_end(job, reason)
        try:
            await self._here.run_in_executor(self._thread, self._engine.close)
        except Exception:
            log.exception("engine-close-failed")

    async def _step(self) -> None:
        """Step the engine, and report what becomes of the jobs."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s if self.jobs or self._rooms else None):
                await self._wake.wait()
        self._wake.clear()
        self._run_calls()
        step = partial(self._engine.step, poll=bool(self._rooms))
        outputs = await self._here.run_in_executor(self._thread, step)
        # A room may end in the step that samples its first token.
        jobs = dict(self.jobs)
        for output in outputs:
            if isinstance(output, Noted):
                self._rooms.take(output)
            else:
                self._take(jobs[output.request], output)
        self._pause_s = 0.0 if outputs else min(2 * self._pause_s or MIN_PAUSE_S, MAX_PAUSE_S)
        if self.is_draining and not (self.jobs or self._rooms or self._num_callers):
            self._quiet.set()

    def _run_calls(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _tell_end(self, job: ServeJob, reason: BaseException | None) -> None:
        why = f"this worker is ending ({reason})" if reason else "this worker is ending"
        trouble = Trouble.ENDED
        if job.request.id in self._engine.in_step:
            is_lost = isinstance(reason, RankLost) and not isinstance(reason, RankBroke)
            trouble = Trouble.LOST if is_lost else Trouble.BROKE_WORKER
        job.fail(trouble, f"{why}; see its log, or ask another one")

    # ------------------------------------------------------------ jobs

    def _begin(self, job: ServeJob) -> None:
        """Give a job to the engine, or on prefill open its room and wait for decode's offer."""
        try:
            self._engine.check(job.request)
        except KvferryError as error:
            self.jobs.pop(job.request.id)
            job.fail(Trouble.INVALID, str(error))
            return
        if job.ticket is not None and self._is_prefill:
            self._open(job, job.ticket, OpenCommand, offered=partial(self._queue, job))
        else:
            self._queue(job)
        self._pause_s = 0.0

    def _queue(self, job: ServeJob) -> None:
        """Pull the prefix if somebody may have it, then give the job to the engine."""
        now = time.monotonic()
        if not job.holder or self._extension is None:
            self._add(job, now, 0)
        elif not job.answered:
            left_s = max(job.transfer_deadline - now, LEAST_S)
            add = partial(self._add, job, now)
            self._prefixes.pull(job.request, job.holder, left_s, job.trace, add)

    def _add(self, job: ServeJob, since: float, pulled: int) -> None:
        if not job.answered:
            if job.holder:
                job.report = {"pulled": pulled, "pull_s": time.monotonic() - since}
            self._engine.add(job.request)
            job.queued = True

    def _stop(self, job: ServeJob) -> None:
        """Stop the computation, and free the pages once no transfer touches them."""
        job.answered = True
        self._pause_s = 0.0
        is_pinned = self._engine.scheduler.cancel(job.request.id)
        if job.request.id in self._rooms:
            self._rooms.abort(job.request.id)
            return
        if is_pinned:
            self._engine.scheduler.release(job.request.id)
        self.jobs.pop(job.request.id, None)

    def _fail(self, job: ServeJob, trouble: Trouble, message: str) -> None:
        if not job.answered:
            job.fail(trouble, message)
            self._stop(job)

    def _take(self, job: ServeJob, output: Admitted | Produced | SampleFailed) -> None:
        match output:
            case Admitted():
                job.admitted_at, job.prefix = time.monotonic(), output.prefix
                job.cached = output.prefix
                if job.ticket is not None and not self._is_prefill:
                    num_tokens = len(job.request.prompt)
                    pages = output.pages[: self._engine.scheduler.blocks.pages_for(num_tokens)]
                    command = partial(
                        ReceiveCommand,
                        prefill=job.ticket.prefill,
                        tokens=num_tokens,
                        prefix=output.prefix,
                        pages=pages,
                    )
                    self._open(job, job.ticket, command)
                elif self._extension is not None:
                    # A transfer would have been possible.
                    source = "recomputed" if job.ticket is None else "computed"
                    job.report |= {"source": source, "prefix": output.prefix}
            case Produced():
                if job.admitted_at is not None and "compute" in str(job.report.get("source")):
                    job.report.setdefault("compute_s", time.monotonic() - job.admitted_at)
                job.send(output)
                # On prefill, the transfer goes on without the job's caller.
                if output.finish is not None and job.request.id not in self._rooms:
                    self.jobs.pop(job.request.id, None)
            case SampleFailed():
                reason = "the model computed logits that are not finite for this prompt"
                self._fail(job, Trouble.SAMPLING, reason)

    # ------------------------------------------------------------ rooms

    def _open(
        self,
        job: ServeJob,
        ticket: Ticket,
        command: Callable[..., OpenCommand],
        offered: Callable[[], None] | None = None,
    ) -> None:
        """Open the job's room at the ranks: decode offers its pages, prefill waits for them."""
        engine, dtype = self._engine, str(self._engine.options.dtype)

        def failed(failure: Failure) -> None:
            # Also after the answer.
            self._fail(job, Trouble.TRANSFER, str(failure))

        self._rooms.open(
            command(
                request=job.request.id,
                room=ticket.room,
                deadline_s=max(job.transfer_deadline - time.monotonic(), LEAST_S),
                digest=digest_of(job.request.prompt, model=engine.model, dtype=dtype),
                trace=job.trace,
            ),
            failed,
            partial(self._settle, job),
            offered,
        )

    def _settle(self, job: ServeJob, agreement: RankAgreement) -> None:
        """Go on with a job whose room has ended: no transfer touches its pages any more."""
        if not self._is_prefill and agreement.status is Status.DONE and not job.answered:
            self._arrive(job, agreement.metadata)
            return
        if job.admitted_at is not None:
            self._engine.scheduler.release(job.request.id)
        self.jobs.pop(job.request.id, None)

    def _arrive(self, job: ServeJob, metadata: bytes) -> None:
        try:
            first = msgspec.msgpack.decode(metadata, type=FirstTokenNote)
            produced = self._engine.arrived(job.request.id, first.sample)
        except (msgspec.DecodeError, KvferryError) as error:
            reason = f"prefill sent no first token that can be used: {error}"
            self._fail(job, Trouble.TRANSFER, reason)
            return
        assert job.admitted_at is not None
        assert job.ticket is not None
        job.cached = first.cached
        job.report |= {
            "room": job.ticket.room,
            "source": "transferred",
            "prefix": job.prefix,
            "bytes": (len(job.request.prompt) - job.prefix) * self._token_bytes,
            "seconds": time.monotonic() - job.admitted_at,
        }
        self._take(job, produced)
