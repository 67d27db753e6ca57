"""The engine's thread: takes jobs, steps the engine, and reports what becomes of them.

Other threads submit and cancel through a queue and read ``snapshot``. If a rank is lost or a
step raises, every job is told, the engine is closed and the thread ends; ``died`` has the
reason. Jobs of the failing step get another code than the rest: they may be the cause, so a
router must not send them to the next worker.

While a room is open the ranks are polled even if there is nothing to compute: often at first,
then less and less often, so that waiting costs little on a small host.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import msgspec
from msgspec.structs import replace

from kvferry import KvferryError, RankAgreement, TransferMode
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import (
    Admitted,
    Computed,
    EngineRole,
    Noted,
    Output,
    Produced,
    SampleFailed,
)
from kvferry.reference.ranks.processes import RankBroke, RankLost
from kvferry.reference.transfer.extensions import RoomExtension
from kvferry.reference.transfer.messages import ReleasedNote, decode_note, take_note
from kvferry.reference.worker.jobs import AnswerPiece, JobFailed, RoomEnd, ServeJob, Trouble
from kvferry.reference.worker.rooms import DecodeRooms, PrefillRooms, RoomEnds

log = logging.getLogger(__name__)

JOIN_S = 30.0
# Between two polls of open rooms while nothing happens.
MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.02
# Between two looks at deadlines while jobs wait, and at the ranks while there is no job.
WATCH_S, IDLE_S = 0.2, 1.0
# Notes come before tokens: a token is no answer if its room was refused in the same step.
_ORDER: dict[type[Output], int] = {
    Admitted: 0,
    Noted: 1,
    Computed: 2,
    Produced: 3,
    SampleFailed: 3,
}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine. ``rooms`` counts requests whose pages a transfer may touch.

    ``carried_bytes`` are what the ranks have sent by mode, ``links`` the transport to each peer.
    """

    running: int = 0
    waiting: int = 0
    rooms: int = 0
    free_tokens: int = 0
    used_pages: int = 0
    used_rows: int = 0
    carried_bytes: dict[str, int] = {}
    links: dict[str, str] = {}


class RunningJobs:
    """The jobs that an engine has taken, until every rank has released their pages."""

    def __init__(self, engine: Engine, role: EngineRole, ends: RoomEnds) -> None:
        self.engine = engine
        self.jobs: dict[str, ServeJob] = {}
        # Each rank's last report of the bytes it has sent by mode, and of its links.
        self._carried: dict[int, dict[str, int]] = {}
        self._links: dict[int, dict[str, str]] = {}
        is_prefill = role is EngineRole.PREFILL
        self._rooms = PrefillRooms(engine) if is_prefill else DecodeRooms(engine)
        self._ends = ends
        self._pause_s = MIN_PAUSE_S

    def snapshot(self) -> Snapshot:
        """Return the state of the engine."""
        scheduler = self.engine.scheduler
        blocks, carried = scheduler.blocks, self._carried.values()
        return Snapshot(
            running=scheduler.num_active,
            waiting=scheduler.num_waiting,
            rooms=self._num_rooms,
            free_tokens=blocks.num_available * blocks.page_tokens,
            used_pages=blocks.num_used,
            used_rows=blocks.num_used_rows,
            carried_bytes={str(m): sum(one.get(m, 0) for one in carried) for m in TransferMode},
            links=_joined(self._links.values()),
        )

    @property
    def _num_rooms(self) -> int:
        return sum(job.agreement is not None for job in self.jobs.values())

    def wait_s(self) -> float:
        """Return how long to wait for calls before the next step."""
        if not self.jobs:
            return IDLE_S
        if self._pause_s == 0 or self._num_rooms:
            return self._pause_s
        return WATCH_S

    def look_soon(self) -> None:
        """Poll the ranks soon: a room has news."""
        self._pause_s = MIN_PAUSE_S

    def step(self) -> None:
        """Step the engine, and report what becomes of the jobs."""
        if not self.jobs:
            self.engine.ranks.check()
        self._expire(time.monotonic())
        outputs = self.engine.step(poll=self._num_rooms > 0)
        for output in sorted(outputs, key=lambda output: _ORDER[type(output)]):
            self._take(output)
        self.jobs = {name: job for name, job in self.jobs.items() if not job.over}
        self._pause_s = 0.0 if outputs else min(2 * self._pause_s or MIN_PAUSE_S, MAX_PAUSE_S)

    def begin(self, job: ServeJob) -> None:
        """Give a job to the engine."""
        try:
            self.engine.add(job.request)
        except KvferryError as error:
            job.fail(Trouble.INVALID, str(error))
            return
        self.jobs[job.id] = job
        self._pause_s = 0.0
        if job.ticket is not None:
            self._rooms.begin(job)

    def stop(self, job: ServeJob) -> None:
        """Stop a job whose caller has left, unless it was answered."""
        if self.jobs.get(job.id) is not job or job.answered:
            return
        if job.ticket is not None:
            self._rooms.stop(job)
        else:
            job.answered = True
            self.engine.cancel(job.id)
            job.over = True
        self._pause_s = 0.0

    def abandon(self, room: str) -> None:
        """Give up an open room, even if its request was answered."""
        for job in self.jobs.values():
            if job.ticket is None or job.agreement is None or str(job.ticket.room) != room:
                continue
            job.fail(Trouble.TRANSFER, "the room was given up")
            self._rooms.stop(job)
            self._pause_s = 0.0

    def _expire(self, now: float) -> None:
        for job in self.jobs.values():
            if job.ticket is not None and now >= job.transfer_deadline and not job.answered:
                self._rooms.expire(job)
            if now >= job.deadline:
                self._fail(job, Trouble.TIMEOUT, "the request took too long; ask for less")

    def _fail(self, job: ServeJob, trouble: Trouble, message: str) -> None:
        if not job.answered:
            self.stop(job)
            job.tell(JobFailed(trouble, message))

    def _take(self, output: Output) -> None:
        match output:
            case Noted(rank=rank, note=data):
                self._take_note(rank, data)
                return
            case _:
                job = self.jobs[output.request]
        match output:
            case Admitted():
                job.admitted_at, job.prefix = time.monotonic(), output.prefix
                if job.ticket is not None:
                    self._rooms.admitted(job, output)
                elif job.report is not None:
                    job.report = replace(job.report, prefix=output.prefix)
            case Computed():
                job.chunks += 1
            case Produced() if isinstance(self._rooms, PrefillRooms) and job.ticket is not None:
                self._rooms.produced(job, output)
            case Produced():
                job.over = output.finish is not None
                job.say(AnswerPiece(output.sample, output.text, output.finish, job.report))
            case SampleFailed():
                self._fail(job, Trouble.SAMPLING, output.reason)

    def _take_note(self, rank: int, data: bytes) -> None:
        note = decode_note(data)
        if isinstance(note, ReleasedNote):
            self._carried[rank], self._links[rank] = note.carried, note.links
        job = self.jobs.get(note.request)
        if job is not None and job.agreement is not None:
            take_note(job.agreement, rank, note)
            if job.agreement.is_released:
                self._remember(job, job.agreement)
            self._rooms.settle(job)

    def _remember(self, job: ServeJob, agreement: RankAgreement) -> None:
        assert job.ticket is not None
        failure = str(agreement.failure) if agreement.failure else None
        moved = agreement.carried
        mode = "+".join(mode for mode, num_bytes in moved.most_common() if num_bytes) or None
        self._ends.tell(RoomEnd(job.ticket.room, failure, mode, moved.total()))


def _joined(ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the transport to each peer; all of them where ranks differ."""
    found: dict[str, set[str]] = {}
    for links in ranks:
        for peer, transport in links.items():
            found.setdefault(peer, set()).add(transport)
    return {peer: "+".join(sorted(transports)) for peer, transports in sorted(found.items())}


class EngineLoop:
    """An engine in a thread of its own; ``make`` is called there."""

    def __init__(self, make: Callable[[], Engine], role: EngineRole) -> None:
        self._make = make
        self._role = role
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stopping = False
        self.ends = RoomEnds()
        self.snapshot = Snapshot()
        self.ready: Future[Engine] = Future()
        # Done when no more steps are made: with None, or with what stopped them.
        self.died: Future[BaseException | None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # ------------------------------------------------------------ for any thread

    def begin(self) -> None:
        """Start the thread; ``ready`` has the engine, or why there is none."""
        self._thread.start()

    def submit(self, job: ServeJob) -> None:
        """Begin a job."""
        self._calls.put(lambda: self._begin(job))
        if self.died.done():
            self._refuse(job)

    def cancel(self, job: ServeJob) -> None:
        """Stop a job whose caller has left, unless it was answered."""
        self._calls.put(lambda: self._running.stop(job))

    def abandon(self, room: str) -> None:
        """Give up an open room, even if its request was answered."""
        self._calls.put(lambda: self._running.abandon(room))

    def stop(self) -> None:
        """End every job, the engine and the thread. Idempotent."""
        self._calls.put(self._end)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        reason: BaseException | None = None
        # From here on, waiting callers cannot cancel it.
        self.ready.set_running_or_notify_cancel()
        try:
            engine = self._make()
            self._running = RunningJobs(engine, self._role, self.ends)
        except BaseException as error:
            self.ready.set_exception(error)
            self.died.set_result(error)
            return
        try:
            if isinstance(engine.worker.extension, RoomExtension):
                look_soon = self._running.look_soon
                engine.worker.extension.on_news = lambda: self._calls.put(look_soon)
            self.snapshot = self._running.snapshot()
            self.ready.set_result(engine)
            while not self._stopping:
                self._run_calls(self._running.wait_s())
                if not self._stopping:
                    self._running.step()
                    self.snapshot = self._running.snapshot()
        except RankLost as error:
            log.error("engine-lost reason=%r", str(error))
            reason = error
        except Exception as error:
            log.exception("engine-broken")
            reason = error
        finally:
            self._close(engine, reason)

    def _run_calls(self, timeout_s: float) -> None:
        """Run the queued calls; wait for the first."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=timeout_s)()
            while True:
                self._calls.get_nowait()()

    def _end(self) -> None:
        self._stopping = True

    def _begin(self, job: ServeJob) -> None:
        if self.died.done():
            self._refuse(job)
        else:
            self._running.begin(job)

    def _close(self, engine: Engine, reason: BaseException | None) -> None:
        self.died.set_result(reason)
        for job in self._running.jobs.values():
            self._tell_end(job, engine, reason)
        # Refuses the jobs that are still in the queue.
        self._run_calls(0)
        try:
            engine.close()
        except Exception:
            log.exception("engine-close-failed")

    @staticmethod
    def _tell_end(job: ServeJob, engine: Engine, reason: BaseException | None) -> None:
        why = f"this worker is ending ({reason})" if reason else "this worker is ending"
        if job.id not in engine.in_step:
            job.fail(Trouble.ENDED, f"{why}; ask another one, or try again")
        elif isinstance(reason, RankLost) and not isinstance(reason, RankBroke):
            job.fail(Trouble.LOST, f"{why} while it computed this request; try again")
        else:
            message = "the worker broke in a step with this request and ends; see its log"
            job.fail(Trouble.BROKE_WORKER, message)

    @staticmethod
    def _refuse(job: ServeJob) -> None:
        job.fail(Trouble.ENDED, "this worker has ended; ask another one")
