"""Rooms at an engine: what its driver does while a cache travels. Runs on the engine's thread.

Each side reacts to events of a job and acts on the engine and, by commands, on the ranks. It
follows what all ranks agree on: one failure aborts the room on the others, and pages are given
back once every rank has released them.

    prefill:  begin: open ─▶ chunks are pushed ─▶ first token: answered ─▶ released: free
    decode:   admitted: receive ─▶ done on all ranks: decode goes on
                            └▶ failed: abort ─▶ released: free, or compute here
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future

import msgspec
from msgspec.structs import replace

from kvferry import Failure, FailureCode, KvferryError, Layout, RankAgreement, Status, digest_of
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import Admitted, EngineRole, FinishReason, Produced
from kvferry.reference.transfer.extensions import RoomExtension
from kvferry.reference.transfer.messages import (
    AbortCommand,
    FirstTokenNote,
    OpenCommand,
    ReceiveCommand,
    encode,
)
from kvferry.reference.worker.jobs import (
    AnswerPiece,
    Fallback,
    Origin,
    RoomEnd,
    ServeJob,
    Ticket,
    TransferAccount,
    Trouble,
)

MAX_ENDS = 1024
_TOO_LATE = Failure(FailureCode.DEADLINE, "decode had no free pages in time; try again later")


class RoomEnds:
    """How the last rooms of a worker ended. Thread-safe and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: OrderedDict[str, Future[RoomEnd]] = OrderedDict()

    def wait_for(self, room: str) -> Future[RoomEnd]:
        """Return the end of a room, which may be in the future."""
        with self._lock:
            return self._get(room)

    def tell(self, end: RoomEnd) -> None:
        """Record how a room ended."""
        with self._lock:
            if self._get(str(end.room)).done():
                # The same room was used before.
                del self._ends[str(end.room)]
            self._get(str(end.room)).set_result(end)

    def _get(self, room: str) -> Future[RoomEnd]:
        end = self._ends.setdefault(room, Future())
        self._ends.move_to_end(room)
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return end


class EngineRooms:
    """What both sides of transfers have in common; each ignores the events it does not need."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        extension = engine.worker.extension
        self._model = extension.settings.model if isinstance(extension, RoomExtension) else ""

    def _digest(self, job: ServeJob) -> bytes:
        """Return what both sides must agree on to share this job's cache."""
        dtype = str(self._engine.options.dtype)
        return digest_of(job.request.prompt, model=self._model, dtype=dtype)

    def _new_agreement(self) -> RankAgreement:
        return RankAgreement(self._engine.layout.num_ranks)

    def begin(self, job: ServeJob) -> None:
        """Handle a job with a ticket that the engine has queued."""

    def admitted(self, job: ServeJob, admitted: Admitted) -> None:
        """Handle a job that has its pages."""

    def expire(self, job: ServeJob) -> None:
        """Handle the deadline of a transfer, which may not have begun."""

    def _abort(self, job: ServeJob) -> None:
        if not job.aborted:
            job.aborted = True
            self._engine.post(encode(AbortCommand(job.id)))


class PrefillRooms(EngineRooms):
    """Rooms of prompts that are computed here and continued elsewhere."""

    def begin(self, job: ServeJob) -> None:
        """Open the room before the first chunk is planned."""
        left_s = max(job.transfer_deadline - time.monotonic(), 0.001)
        job.agreement = self._new_agreement()
        opened = OpenCommand(
            request=job.id,
            room=_ticket(job).room,
            deadline_s=left_s,
            digest=self._digest(job),
            asked_as=job.asked_as,
            traceparent=job.traceparent,
        )
        self._engine.post(encode(opened))

    def produced(self, job: ServeJob, produced: Produced) -> None:
        """Answer with the first token; the transfer goes on without the job's caller."""
        report = TransferAccount(
            room=_ticket(job).room,
            prefix=job.prefix,
            num_bytes=self._engine.layout.spec.payload_bytes(len(job.request.prompt)),
            chunks=job.chunks,
            seconds=time.monotonic() - job.begun_at,
        )
        job.say(AnswerPiece(produced.sample, produced.text, FinishReason.LENGTH, report))

    def settle(self, job: ServeJob) -> None:
        """Stop when a rank has failed; free the pages when all have released them."""
        assert job.agreement is not None
        if job.agreement.failure is not None:
            job.fail(Trouble.TRANSFER, str(job.agreement.failure))
            self.stop(job)
        if job.agreement.is_released:
            if job.admitted_at is not None:
                self._engine.release(job.id)
            job.over = True

    def stop(self, job: ServeJob) -> None:
        """Stop the computation and wait until the ranks release the pages."""
        job.answered = True
        self._engine.cancel(job.id)
        self._abort(job)


class DecodeRooms(EngineRooms):
    """Rooms of prompts that are computed elsewhere and continued here."""

    def admitted(self, job: ServeJob, admitted: Admitted) -> None:
        """Offer the pages to the prefill instance."""
        if job.recomputed:
            return
        ticket, tokens = _ticket(job), len(job.request.prompt)
        left_s = job.transfer_deadline - time.monotonic()
        if left_s <= 0:
            self._fail(job, _TOO_LATE)
            self._free(job)
            return
        job.agreement = self._new_agreement()
        num_pages = self._engine.scheduler.blocks.pages_for(tokens)
        command = ReceiveCommand(
            request=job.id,
            room=ticket.room,
            deadline_s=left_s,
            digest=self._digest(job),
            prefill=ticket.prefill or "",
            tokens=tokens,
            prefix=admitted.prefix,
            pages=admitted.pages[:num_pages],
            row=admitted.row,
            asked_as=job.asked_as,
            traceparent=job.traceparent,
        )
        self._engine.post(encode(command))

    def settle(self, job: ServeJob) -> None:
        """Go on when all ranks have everything; give up when one has failed."""
        agreement = job.agreement
        assert agreement is not None
        if agreement.failure is not None:
            self._abort(job)
            self._fail(job, agreement.failure)
        if agreement.is_released:
            job.agreement = None
            if agreement.status is Status.DONE and not job.answered:
                self._arrive(job, agreement.metadata)
            else:
                self._free(job)

    def _fail(self, job: ServeJob, failure: Failure) -> None:
        """Tell the caller, unless the prompt is to be computed here."""
        if _ticket(job).fallback is Fallback.FAIL:
            job.fail(Trouble.TRANSFER, str(failure))

    def _free(self, job: ServeJob) -> None:
        """Use the pages to compute the prompt, or give them back; no transfer touches them."""
        if job.answered:
            self._engine.cancel(job.id)
            self._engine.release(job.id)
            job.over = True
            return
        self._mark_recomputed(job)
        self._engine.recompute(job.id)

    def _mark_recomputed(self, job: ServeJob) -> None:
        job.recomputed = True
        job.report = TransferAccount(room=_ticket(job).room, source=Origin.RECOMPUTED)

    def _arrive(self, job: ServeJob, metadata: bytes) -> None:
        try:
            first = msgspec.msgpack.decode(metadata, type=FirstTokenNote)
            produced = self._engine.arrived(job.id, first.sample)
        except (msgspec.DecodeError, KvferryError) as error:
            job.fail(Trouble.TRANSFER, f"prefill sent no first token that can be used: {error}")
            self._free(job)
            return
        assert job.admitted_at is not None
        job.report = TransferAccount(
            room=_ticket(job).room,
            source=Origin.TRANSFERRED,
            prefix=job.prefix,
            num_bytes=_num_bytes(self._engine.layout, len(job.request.prompt), job.prefix),
            seconds=time.monotonic() - job.admitted_at,
        )
        job.over = produced.finish is not None
        where = (first.http, first.life) if first.http else None
        job.say(AnswerPiece(produced.sample, produced.text, produced.finish, job.report, where))

    def stop(self, job: ServeJob) -> None:
        """Take the offer back, if there is one, and wait until the ranks release the pages."""
        job.answered = True
        pinned = self._engine.cancel(job.id)
        if job.agreement is not None:
            self._abort(job)
            return
        if pinned:
            self._engine.release(job.id)
        job.over = True

    def expire(self, job: ServeJob) -> None:
        """Give up a transfer whose job still waits for pages."""
        if job.admitted_at is not None or job.recomputed:
            return
        self._fail(job, _TOO_LATE)
        self._engine.cancel(job.id)
        job.over = job.answered
        if not job.answered:
            self._mark_recomputed(job)
            job.request = replace(job.request, role=EngineRole.WHOLE)
            self._engine.add(job.request)


def _ticket(job: ServeJob) -> Ticket:
    assert job.ticket is not None
    return job.ticket


def _num_bytes(layout: Layout, tokens: int, prefix: int) -> int:
    """Return what all ranks of a target together receive for a request."""
    total = 0
    for rank in range(layout.num_ranks):
        for shard in layout.rank_shards(rank):
            group = layout.spec.group(shard.group)
            entries = len(group.owed(tokens, prefix)) * len(group.layers_in(shard.layers))
            total += entries * len(shard.units) * group.unit_bytes
    return total
