"""The jobs that an engine has taken, and their rooms. Runs on the engine's thread.

Jobs act on the engine and, by commands, on the ranks. A room follows what all ranks agree on:
one failure aborts it on the others, and pages are given back once every rank has released them.

    prefill:  begin: open ─▶ chunks are pushed ─▶ first token: answered ─▶ released: free
    decode:   admitted: receive ─▶ done on all ranks: decode goes on
                            └▶ failed: abort ─▶ released: free, or compute here

While a room is open the ranks are polled even if there is nothing to compute: often at first,
then less and less often, so that waiting costs little on a small host.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from kvferry import (
    Failure,
    FailureCode,
    KvferryError,
    Layout,
    RankAgreement,
    Status,
    TransferMode,
    digest_of,
)
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
from kvferry.reference.transfer.extensions import RoomExtension
from kvferry.reference.transfer.messages import (
    AbortCommand,
    FirstTokenNote,
    OpenCommand,
    ReceiveCommand,
    ReleasedNote,
    decode_note,
    encode,
    take_note,
)
from kvferry.reference.worker.jobs import (
    Fallback,
    Origin,
    RoomEnd,
    RoomEnds,
    ServeJob,
    TransferAccount,
    Trouble,
)

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
_TOO_LATE = Failure(FailureCode.DEADLINE, "decode had no free pages in time; try again later")


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
        self._is_prefill = role is EngineRole.PREFILL
        self._ends = ends
        extension = engine.ranks.worker.extension
        self._model = extension.settings.model if isinstance(extension, RoomExtension) else ""
        # Each rank's last report of the bytes it has sent by mode, and of its links.
        self._carried: dict[int, dict[str, int]] = {}
        self._links: dict[int, dict[str, str]] = {}
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

    # ------------------------------------------------------------ calls of other threads

    def begin(self, job: ServeJob) -> None:
        """Give a job to the engine; on prefill, open its room before a chunk is planned."""
        try:
            self.engine.add(job.ask.request)
        except KvferryError as error:
            job.fail(Trouble.INVALID, str(error))
            return
        self.jobs[job.id] = job
        self._pause_s = 0.0
        if job.ask.ticket is None or not self._is_prefill:
            return
        job.agreement = RankAgreement(self.engine.layout.num_ranks)
        command = OpenCommand(
            job.id,
            job.room,
            max(job.transfer_deadline - time.monotonic(), 0.001),
            self._digest(job),
            *job.trace,
        )
        self.engine.post(encode(command))

    def stop(self, job: ServeJob) -> None:
        """Stop a job whose caller has left, unless it was answered."""
        if self.jobs.get(job.id) is job and not job.answered:
            self._stop(job)

    def abandon(self, room: str) -> None:
        """Give up an open room, even if its request was answered."""
        for job in self.jobs.values():
            if job.agreement is not None and str(job.room) == room:
                job.fail(Trouble.TRANSFER, "the room was given up")
                self._stop(job)

    def _stop(self, job: ServeJob) -> None:
        """Stop the computation, and free the pages once no transfer touches them."""
        job.answered = True
        self._pause_s = 0.0
        is_pinned = self.engine.scheduler.cancel(job.id)
        if job.agreement is not None:
            self._abort(job)
            return
        if is_pinned:
            self.engine.scheduler.release(job.id)
        job.over = True

    def _abort(self, job: ServeJob) -> None:
        if not job.aborted:
            job.aborted = True
            self.engine.post(encode(AbortCommand(job.id)))

    # ------------------------------------------------------------ steps

    def step(self) -> None:
        """Step the engine, and report what becomes of the jobs."""
        if not self.jobs:
            self.engine.ranks.check()
        self._expire(time.monotonic())
        outputs = self.engine.step(poll=self._num_rooms > 0)
        for output in sorted(outputs, key=lambda output: _ORDER[type(output)]):
            if isinstance(output, Noted):
                self._take_note(output)
            else:
                self._take(self.jobs[output.request], output)
        self.jobs = {name: job for name, job in self.jobs.items() if not job.over}
        self._pause_s = 0.0 if outputs else min(2 * self._pause_s or MIN_PAUSE_S, MAX_PAUSE_S)

    def _expire(self, now: float) -> None:
        for job in self.jobs.values():
            waits = not self._is_prefill and job.admitted_at is None and not job.recomputed
            is_late = job.ask.ticket is not None and now >= job.transfer_deadline
            if waits and is_late and not job.answered:
                self._lose_transfer(job, _TOO_LATE)
                self._give_back(job)
            if now >= job.deadline:
                self._fail(job, Trouble.TIMEOUT, "the request took too long; ask for less")

    def _fail(self, job: ServeJob, trouble: Trouble, message: str) -> None:
        if not job.answered:
            job.fail(trouble, message)
            self._stop(job)

    def _take(self, job: ServeJob, output: Admitted | Computed | Produced | SampleFailed) -> None:
        match output:
            case Admitted():
                job.admitted_at, job.prefix = time.monotonic(), output.prefix
                if job.ask.ticket is None and job.report is not None:
                    job.report = replace(job.report, prefix=output.prefix)
                elif job.ask.ticket is not None and not self._is_prefill and not job.recomputed:
                    self._receive(job, output)
            case Produced():
                # On prefill, the transfer goes on without the job's caller, or has just ended.
                if output.finish is not None and job.agreement is None:
                    job.over = True
                job.send(output)
            case SampleFailed():
                self._fail(job, Trouble.SAMPLING, output.reason)

    # ------------------------------------------------------------ rooms

    def _digest(self, job: ServeJob) -> bytes:
        """Return what both sides must agree on to share this job's cache."""
        dtype = str(self.engine.options.dtype)
        return digest_of(job.ask.request.prompt, model=self._model, dtype=dtype)

    def _receive(self, job: ServeJob, admitted: Admitted) -> None:
        """Offer the job's pages to the prefill instance."""
        left_s = job.transfer_deadline - time.monotonic()
        if left_s <= 0:
            self._lose_transfer(job, _TOO_LATE)
            self._give_back(job)
            return
        assert job.ask.ticket is not None
        num_tokens = len(job.ask.request.prompt)
        num_pages = self.engine.scheduler.blocks.pages_for(num_tokens)
        job.agreement = RankAgreement(self.engine.layout.num_ranks)
        command = ReceiveCommand(
            job.id,
            job.room,
            left_s,
            self._digest(job),
            job.ask.ticket.prefill or "",
            num_tokens,
            admitted.prefix,
            admitted.pages[:num_pages],
            admitted.row,
            *job.trace,
        )
        self.engine.post(encode(command))

    def _take_note(self, noted: Noted) -> None:
        note = decode_note(noted.note)
        if isinstance(note, ReleasedNote):
            self._carried[noted.rank], self._links[noted.rank] = note.carried, note.links
        job = self.jobs.get(note.request)
        if job is None or job.agreement is None:
            return
        take_note(job.agreement, noted.rank, note)
        if job.agreement.failure is not None:
            self._abort(job)
            self._lose_transfer(job, job.agreement.failure)
        if job.agreement.is_released:
            self._record_end(job, job.agreement)
            self._settle(job, job.agreement)

    def _record_end(self, job: ServeJob, agreement: RankAgreement) -> None:
        failure = str(agreement.failure) if agreement.failure else None
        moved = agreement.carried
        mode = "+".join(mode for mode, num_bytes in moved.most_common() if num_bytes) or None
        self._ends.record(RoomEnd(job.room, failure, mode, moved.total()))

    def _lose_transfer(self, job: ServeJob, failure: Failure) -> None:
        """Fail the job, unless its prompt is to be computed here."""
        assert job.ask.ticket is not None
        if self._is_prefill:
            job.fail(Trouble.TRANSFER, str(failure))
            self._stop(job)
        elif job.ask.ticket.fallback is Fallback.FAIL:
            job.fail(Trouble.TRANSFER, str(failure))

    def _settle(self, job: ServeJob, agreement: RankAgreement) -> None:
        """Go on with a job whose room has ended: no transfer touches its pages any more."""
        if self._is_prefill:
            if job.admitted_at is not None:
                self.engine.scheduler.release(job.id)
            job.over = True
            return
        job.agreement = None
        if agreement.status is Status.DONE and not job.answered:
            self._arrive(job, agreement.metadata)
        else:
            self._give_back(job)

    def _give_back(self, job: ServeJob) -> None:
        """Compute the prompt here, or free the pages if the job was answered."""
        if job.answered:
            self._stop(job)
            return
        job.recomputed = True
        job.report = TransferAccount(room=job.room, source=Origin.RECOMPUTED)
        self.engine.scheduler.recompute(job.id)

    def _arrive(self, job: ServeJob, metadata: bytes) -> None:
        try:
            first = msgspec.msgpack.decode(metadata, type=FirstTokenNote)
            produced = self.engine.arrived(job.id, first.sample)
        except (msgspec.DecodeError, KvferryError) as error:
            job.fail(Trouble.TRANSFER, f"prefill sent no first token that can be used: {error}")
            self._give_back(job)
            return
        assert job.admitted_at is not None
        job.report = TransferAccount(
            room=job.room,
            source=Origin.TRANSFERRED,
            prefix=job.prefix,
            num_bytes=_num_bytes(self.engine.layout, len(job.ask.request.prompt), job.prefix),
            seconds=time.monotonic() - job.admitted_at,
        )
        job.over = produced.finish is not None
        job.prefill = (first.http, first.life) if first.http else None
        job.send(produced)


def _joined(ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the transport to each peer; all of them where ranks differ."""
    found: dict[str, set[str]] = {}
    for links in ranks:
        for peer, transport in links.items():
            found.setdefault(peer, set()).add(transport)
    return {peer: "+".join(sorted(transports)) for peer, transports in sorted(found.items())}


def _num_bytes(layout: Layout, tokens: int, prefix: int) -> int:
    """Return what all ranks of a target together receive for a request."""
    total = 0
    for rank in range(layout.num_ranks):
        for shard in layout.rank_shards(rank):
            group = layout.spec.group(shard.group)
            entries = len(group.owed(tokens, prefix)) * len(group.layers_in(shard.layers))
            total += entries * len(shard.units) * group.unit_bytes
    return total
