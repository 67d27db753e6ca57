"""Jobs that an engine has taken, from their beginning until every rank let go of their pages.

While a room is open the ranks are asked for news even if there is nothing to compute:
often at first, then ever less often, so that waiting costs little on a small host.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from kvferry import KvferryError, RankAgreement
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import (
    Admitted,
    Computed,
    EngineRole,
    Noted,
    Output,
    Produced,
)
from kvferry.reference.engine.steps import SampleFailed
from kvferry.reference.transfer.messages import ReleasedNote, decode_note, take_note
from kvferry.reference.worker.ends import RoomEnds
from kvferry.reference.worker.jobs import AnswerPiece, JobFailed, RoomEnd, ServeJob, Trouble
from kvferry.reference.worker.rooms import DecodeRooms, EngineRooms, PrefillRooms

# How long the thread waits between two looks at rooms while nothing happens.
LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.02
# How often it looks at deadlines while jobs wait and no room is open.
WATCH_S = 0.2
_TURN: dict[type[Output], int] = {
    Admitted: 0,
    Noted: 1,
    Computed: 2,
    Produced: 3,
    SampleFailed: 3,
}


class RunningJobs:
    """The jobs of one engine. All of it runs on the engine's thread."""

    def __init__(self, engine: Engine, role: EngineRole, ends: RoomEnds) -> None:
        self.engine = engine
        self.jobs: dict[str, ServeJob] = {}
        # By rank, as it said last: the bytes that it has sent by mode, and its links.
        self.carried: dict[int, dict[str, int]] = {}
        self.links: dict[int, dict[str, str]] = {}
        self._rooms: EngineRooms = (
            PrefillRooms(engine) if role is EngineRole.PREFILL else DecodeRooms(engine)
        )
        self._ends = ends
        self._pause_s = LEAST_PAUSE_S

    @property
    def num_rooms(self) -> int:
        """Requests whose pages a transfer may touch."""
        return sum(job.agreement is not None for job in self.jobs.values())

    # ------------------------------------------------------------ pace

    def wait_s(self) -> float | None:
        """How long to wait for calls; None where only a call can bring something to do."""
        if not self.jobs:
            return None
        if self._pause_s == 0 or self.num_rooms:
            return self._pause_s
        return WATCH_S

    def look(self) -> None:
        """There is news from a room."""
        self._pause_s = LEAST_PAUSE_S

    def step(self) -> None:
        """Step the engine, and tell what becomes of the jobs."""
        self._expire(time.monotonic())
        outputs = self.engine.step(poll=self.num_rooms > 0)
        # A token of a request whose room was refused in the same step is no answer any more.
        for output in sorted(outputs, key=lambda output: _TURN[type(output)]):
            self._take(output)
        self.jobs = {name: job for name, job in self.jobs.items() if not job.over}
        self._pause_s = 0.0 if outputs else min(2 * self._pause_s or LEAST_PAUSE_S, MOST_PAUSE_S)

    # ------------------------------------------------------------ jobs

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
        """Its caller has left. What was answered before goes on to its end."""
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
        """Give a room up, also if its request was answered."""
        for job in self.jobs.values():
            # A job without an agreement has no open room: it is recomputed, or long done.
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
        """Stop a job here and tell its caller why."""
        if not job.answered:
            self.stop(job)
            job.tell(JobFailed(trouble, message))

    def _take(self, output: Output) -> None:
        match output:
            case SampleFailed(request=request, reason=reason):
                self._fail(self.jobs[request], Trouble.SAMPLING, reason)
            case Noted(rank=rank, note=data):
                self._note(rank, data)
            case Admitted(request=request):
                self._admitted(self.jobs[request], output)
            case Computed(request=request):
                self.jobs[request].chunks += 1
            case Produced(request=request):
                self._produced(self.jobs[request], output)

    def _admitted(self, job: ServeJob, admitted: Admitted) -> None:
        job.admitted_at = time.monotonic()
        job.prefix = admitted.prefix
        if job.ticket is None and job.report is not None:
            job.report = replace(job.report, prefix=admitted.prefix)
        if job.ticket is not None:
            self._rooms.admitted(job, admitted)

    def _produced(self, job: ServeJob, produced: Produced) -> None:
        if job.request.role is EngineRole.PREFILL and isinstance(self._rooms, PrefillRooms):
            self._rooms.produced(job, produced)
            return
        job.over = produced.finish is not None
        job.say(AnswerPiece(produced.sample, produced.text, produced.finish, job.report))

    def _note(self, rank: int, data: bytes) -> None:
        note = decode_note(data)
        if isinstance(note, ReleasedNote):
            self.carried[rank], self.links[rank] = note.carried, note.links
        job = self.jobs.get(note.request)
        if job is not None and job.agreement is not None:
            take_note(job.agreement, rank, note)
            if job.agreement.is_released:
                self._remember(job, job.agreement)
            self._rooms.settle(job)

    def _remember(self, job: ServeJob, agreement: RankAgreement) -> None:
        """Keep the outcome of a room for a while."""
        assert job.ticket is not None
        failure = str(agreement.failure) if agreement.failure else None
        room, moved = job.ticket.room, agreement.carried
        mode = "+".join(mode for mode, num_bytes in moved.most_common() if num_bytes) or None
        self._ends.tell(RoomEnd(room, failure, mode, moved.total()))
