"""The engine's thread: takes jobs, steps the engine, and tells what becomes of them.

Other threads submit and cancel through a queue and read ``snapshot``. While a
room is open the ranks are asked for news even if there is nothing to compute:
often at first, then ever less often, so that waiting costs little on a small host.

If a rank is lost, every job is told so, the engine is closed and the thread ends;
``died`` says why. Whoever runs the worker starts it anew. That a rank is silent, or
a step does not end, comes from another thread (``lose``), since this one may be stuck.

A job that ran in the failing step fails with another code than the other jobs: it may be the
cause, so the router must not send it to the next worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

import msgspec
from msgspec.structs import replace

from kvferry import Agreement, KvferryError, Path
from kvferry.mailbox import Mailbox
from kvferry.serve.engine.engine import Engine
from kvferry.serve.engine.requests import Admitted, Computed, Noted, Output, Produced, Role
from kvferry.serve.engine.steps import SampleFailed
from kvferry.serve.ranks.processes import RankBroke, RankLost
from kvferry.serve.transfer.extension import RoomExtension
from kvferry.serve.transfer.messages import Released, decode_note, take_note
from kvferry.serve.worker.ends import RoomEnds
from kvferry.serve.worker.jobs import AnswerPiece, JobFailed, RoomEnd, ServeJob, Trouble
from kvferry.serve.worker.rooms import DecodeRooms, PrefillRooms, Rooms

log = logging.getLogger(__name__)

# How long the thread waits between two looks at rooms while nothing happens.
LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.02
# How often it looks at deadlines while jobs wait and no room is open.
WATCH_S = 0.2
JOIN_S = 30.0
# A thread that is stuck is not waited for, but one that has just been freed may close its engine.
JOIN_LOST_S = 5.0
_TURN: dict[type[Output], int] = {
    Admitted: 0,
    Noted: 1,
    Computed: 2,
    Produced: 3,
    SampleFailed: 3,
}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine stands. ``carried_bytes`` are what its ranks have sent, by path;
    ``links`` the transport that they have to each of their peers.

    ``rooms`` counts requests whose pages a transfer may touch, also those whose
    callers have left.
    """

    running: int = 0
    waiting: int = 0
    rooms: int = 0
    free_tokens: int = 0
    used_pages: int = 0
    used_rows: int = 0
    carried_bytes: dict[str, int] = {}
    links: dict[str, str] = {}


class EngineLoop:
    """An engine in a thread of its own. ``make`` is called there."""

    def __init__(self, make: Callable[[], Engine], role: Role) -> None:
        self._make = make
        self._role = role
        self._inbox: Mailbox[Callable[[], None]] = Mailbox()
        self._jobs: dict[str, ServeJob] = {}
        # Submitted, and not begun yet.
        self._coming: dict[str, ServeJob] = {}
        self._dying = threading.Lock()
        self._carried: dict[int, dict[str, int]] = {}
        self._links: dict[int, dict[str, str]] = {}
        self.ends = RoomEnds()
        self._stopping = False
        self._lost = False
        self._pause_s = LEAST_PAUSE_S
        self.snapshot = Snapshot()
        self.ready: Future[Engine] = Future()
        # Done when no more steps are made: with None, or what stopped them.
        self.died: Future[BaseException | None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # ------------------------------------------------------------ for any thread

    def begin(self) -> None:
        """Start the thread; ``ready`` has the engine, or why there is none."""
        self._thread.start()

    @property
    def figures(self) -> list[str]:
        """What ranks of other processes count, for Prometheus."""
        is_there = self.ready.done() and self.ready.exception() is None
        return self.ready.result().figures if is_there else []

    def submit(self, job: ServeJob) -> None:
        """Begin a job."""
        self._coming[job.id] = job
        self._inbox.put(partial(self._begin, job))
        if self.died.done():
            job.fail(Trouble.ENDED, "this worker has ended; ask another one")

    def cancel(self, job: ServeJob) -> None:
        """Its caller has left. What was answered before goes on to its end."""
        self._inbox.put(partial(self._stop, job))

    def abandon(self, room: str) -> None:
        """Nobody will come for this room: give it up, also if its request was answered."""
        self._inbox.put(partial(self._abandon, room))

    def wake(self) -> None:
        """There is news from a room."""
        self._inbox.put(self._look)

    def lose(self, reason: KvferryError) -> None:
        """A rank is lost: every job is told now, even if the thread never comes back."""
        log.error("engine-lost reason=%r", str(reason))
        self._lost = True
        self._die(reason)
        self._inbox.put(self._end)

    def stop(self) -> None:
        """End every job, the engine and the thread. Idempotent."""
        self._inbox.put(self._end)
        if self._thread.ident is not None:
            self._thread.join(JOIN_LOST_S if self._lost else JOIN_S)

    def _die(self, reason: BaseException | None) -> None:
        with self._dying:
            if self.died.done():
                return
            self.died.set_result(reason)
        why = f"this worker is ending ({reason})" if reason else "this worker is ending"
        for job in (*self._coming.values(), *self._jobs.values()):
            if job.id not in self._engine.in_step:
                job.fail(Trouble.ENDED, f"{why}; ask another one, or try again")
            elif isinstance(reason, RankLost) and not isinstance(reason, RankBroke):
                job.fail(Trouble.LOST, f"{why} while it computed this request; try again")
            else:
                job.fail(
                    Trouble.BROKE_WORKER,
                    "the worker broke in a step with this request and ends; see its log",
                )

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        reason: BaseException | None = None
        # Who stops waiting for it does not change what it is.
        self.ready.set_running_or_notify_cancel()
        try:
            engine = self._make()
        except BaseException as error:
            self.ready.set_exception(error)
            self.died.set_result(error)
            return
        try:
            self._engine = engine
            self._rooms: Rooms = (
                PrefillRooms(engine) if self._role is Role.PREFILL else DecodeRooms(engine)
            )
            engine.on_lost(self.lose)
            if isinstance(engine.worker.extension, RoomExtension):
                engine.worker.extension.on_news = self.wake
            self._look_around()
            self.ready.set_result(engine)
            while not self._stopping:
                self._turn()
        except RankLost as error:
            if not self.died.done():
                log.error("engine-lost reason=%r", str(error))
            reason = error
        except Exception as error:
            log.exception("engine-broken")
            reason = error
        finally:
            self._close(engine, reason)

    def _close(self, engine: Engine, reason: BaseException | None) -> None:
        self._die(reason)
        # What was submitted meanwhile is told so by ``_begin``.
        for call in self._inbox.drain(0):
            call()
        try:
            engine.close()
        except Exception:
            log.exception("engine-close-failed")

    def _turn(self) -> None:
        for call in self._inbox.drain(self._wait_s()):
            call()
        if self._stopping:
            return
        self._expire(time.monotonic())
        outputs = self._engine.step(poll=self._has_rooms)
        # A token of a request whose room was refused in the same step is no answer any more.
        for output in sorted(outputs, key=lambda output: _TURN[type(output)]):
            self._take(output)
        self._jobs = {name: job for name, job in self._jobs.items() if not job.over}
        self._pause_s = 0.0 if outputs else min(2 * self._pause_s or LEAST_PAUSE_S, MOST_PAUSE_S)
        self._look_around()

    @property
    def _has_rooms(self) -> bool:
        return any(job.agreement is not None for job in self._jobs.values())

    def _wait_s(self) -> float | None:
        """How long to wait for calls; None where only a call can bring something to do."""
        if not self._jobs:
            return None
        if self._pause_s == 0 or self._has_rooms:
            return self._pause_s
        return WATCH_S

    def _look(self) -> None:
        self._pause_s = LEAST_PAUSE_S

    def _end(self) -> None:
        self._stopping = True

    def _look_around(self) -> None:
        scheduler = self._engine.scheduler
        blocks = scheduler.blocks
        self.snapshot = Snapshot(
            running=scheduler.num_active,
            waiting=scheduler.num_waiting,
            rooms=sum(job.agreement is not None for job in self._jobs.values()),
            free_tokens=blocks.num_available * blocks.page_tokens,
            used_pages=blocks.num_used,
            used_rows=blocks.num_used_rows,
            carried_bytes=self._totals(),
            links=_together(self._links.values()),
        )

    def _totals(self) -> dict[str, int]:
        ranks = self._carried.values()
        return {str(path): sum(carried.get(path, 0) for carried in ranks) for path in Path}

    # ------------------------------------------------------------ jobs

    def _begin(self, job: ServeJob) -> None:
        self._coming.pop(job.id, None)
        if self.died.done():
            job.fail(Trouble.ENDED, "this worker has ended; ask another one")
            return
        try:
            self._engine.add(job.request)
        except KvferryError as error:
            job.fail(Trouble.INVALID, str(error))
            return
        self._jobs[job.id] = job
        self._pause_s = 0.0
        if job.ticket is not None:
            self._rooms.begin(job)

    def _stop(self, job: ServeJob) -> None:
        if self._jobs.get(job.id) is not job or job.answered:
            return
        if job.ticket is not None:
            self._rooms.stop(job)
        else:
            job.answered = True
            self._engine.cancel(job.id)
            job.over = True
        self._pause_s = 0.0

    def _abandon(self, room: str) -> None:
        for job in self._jobs.values():
            # A job without an agreement has no open room: it is recomputed, or long done.
            if job.ticket is None or job.agreement is None or str(job.ticket.room) != room:
                continue
            job.fail(Trouble.TRANSFER, "the room was given up")
            self._rooms.stop(job)
            self._pause_s = 0.0

    def _expire(self, now: float) -> None:
        for job in self._jobs.values():
            if job.ticket is not None and now >= job.transfer_deadline and not job.answered:
                self._rooms.expire(job)
            if now >= job.deadline:
                self._fail(job, Trouble.TIMEOUT, "the request took too long; ask for less")

    def _fail(self, job: ServeJob, trouble: Trouble, message: str) -> None:
        """Stop a job here and tell its caller why."""
        if not job.answered:
            self._stop(job)
            job.tell(JobFailed(trouble, message))

    def _take(self, output: Output) -> None:
        match output:
            case SampleFailed(request=request, reason=reason):
                self._fail(self._jobs[request], Trouble.SAMPLING, reason)
            case Noted(rank=rank, note=data):
                self._note(rank, data)
            case Admitted(request=request):
                self._admitted(self._jobs[request], output)
            case Computed(request=request):
                self._jobs[request].chunks += 1
            case Produced(request=request):
                self._produced(self._jobs[request], output)

    def _admitted(self, job: ServeJob, admitted: Admitted) -> None:
        job.admitted_at = time.monotonic()
        job.prefix = admitted.prefix
        if job.ticket is None and job.report is not None:
            job.report = replace(job.report, prefix=admitted.prefix)
        if job.ticket is not None:
            self._rooms.admitted(job, admitted)

    def _produced(self, job: ServeJob, produced: Produced) -> None:
        if job.request.role is Role.PREFILL and isinstance(self._rooms, PrefillRooms):
            self._rooms.produced(job, produced)
            return
        job.over = produced.finish is not None
        job.say(AnswerPiece(produced.sample, produced.text, produced.finish, job.report))

    def _note(self, rank: int, data: bytes) -> None:
        note = decode_note(data)
        if isinstance(note, Released):
            self._carried[rank], self._links[rank] = note.carried, note.links
        job = self._jobs.get(note.request)
        if job is not None and job.agreement is not None:
            take_note(job.agreement, rank, note)
            if job.agreement.is_released:
                self._remember(job, job.agreement)
            self._rooms.settle(job)

    def _remember(self, job: ServeJob, agreement: Agreement) -> None:
        """Keep how a room ended for whoever asks soon."""
        assert job.ticket is not None
        failure = str(agreement.failure) if agreement.failure else None
        room, moved = job.ticket.room, agreement.carried
        path = "+".join(path for path, num_bytes in moved.most_common() if num_bytes) or None
        self.ends.tell(RoomEnd(room, failure, path, moved.total()))


def _together(ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The transport to each peer; all that ranks have, where they differ."""
    found: dict[str, set[str]] = {}
    for links in ranks:
        for peer, transport in links.items():
            found.setdefault(peer, set()).add(transport)
    return {peer: "+".join(sorted(transports)) for peer, transports in sorted(found.items())}
