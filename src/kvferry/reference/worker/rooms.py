"""EngineRooms at an engine: what its driver does when a cache travels. Runs on the engine's thread.

Each side is told what happens to a job and acts on the engine and, by commands,
on the ranks. It acts on what all ranks agree on: one failure aborts the room on
the others, and pages are given back when every rank has released them.

    prefill:  begin: OpenCommand ─▶ chunks are pushed ─▶ first token: answered ─▶ released: free
    decode:   admitted: ReceiveCommand ─▶ done on all: decode goes on
                                └▶ failed: abort ─▶ released: free, or compute here
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import msgspec
from msgspec.structs import replace

from kvferry import Failure, FailureCode, KvferryError, Layout, RankAgreement, Status, digest_of
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import Admitted, EngineRole, FinishReason, Produced
from kvferry.reference.transfer.extension import RoomExtension
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
    ServeJob,
    Ticket,
    TransferAccount,
    Trouble,
)


class EngineRooms(ABC):
    """One side of transfers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_ranks = engine.layout.num_ranks
        extension = engine.worker.extension
        self._model = extension.settings.model if isinstance(extension, RoomExtension) else ""

    def _digest(self, job: ServeJob) -> bytes:
        """What the other side must have computed, or be asked for, to share this job's cache."""
        dtype = str(self._engine.options.dtype)
        return digest_of(job.request.prompt, model=self._model, dtype=dtype)

    @abstractmethod
    def begin(self, job: ServeJob) -> None:
        """The engine has taken a job with a ticket."""

    @abstractmethod
    def admitted(self, job: ServeJob, admitted: Admitted) -> None:
        """It has its pages."""

    @abstractmethod
    def settle(self, job: ServeJob) -> None:
        """A rank has noted something; act if that decides anything."""

    @abstractmethod
    def stop(self, job: ServeJob) -> None:
        """Nobody wants the answer any more."""

    @abstractmethod
    def expire(self, job: ServeJob) -> None:
        """The time for the transfer is over, and it may not even have begun."""

    def _abort(self, job: ServeJob) -> None:
        if not job.aborted:
            job.aborted = True
            self._engine.post(encode(AbortCommand(job.id)))


class PrefillRooms(EngineRooms):
    """Prompts are computed here and continued elsewhere."""

    def begin(self, job: ServeJob) -> None:
        """OpenCommand the room before the first chunk is planned."""
        left_s = job.transfer_deadline - time.monotonic()
        job.agreement = RankAgreement(self._num_ranks)
        whose = job.asked_as, job.traceparent
        opened = OpenCommand(
            job.id, _ticket(job).room, max(left_s, 0.001), self._digest(job), *whose
        )
        self._engine.post(encode(opened))

    def admitted(self, job: ServeJob, admitted: Admitted) -> None:
        """Nothing to do: ranks push what they see computed."""

    def produced(self, job: ServeJob, produced: Produced) -> None:
        """The first token is the whole answer; the transfer goes on without it."""
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
        """Compute no further, and wait for the ranks' release."""
        job.answered = True
        self._engine.cancel(job.id)
        self._abort(job)

    def expire(self, job: ServeJob) -> None:
        """The endpoints know the deadline themselves."""


class DecodeRooms(EngineRooms):
    """Prompts are computed elsewhere and continued here."""

    def begin(self, job: ServeJob) -> None:
        """Nothing to offer before there are pages."""

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
        job.agreement = RankAgreement(self._num_ranks)
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
        """Tell the caller at once, unless the prompt is to be computed here."""
        if _ticket(job).fallback is Fallback.FAIL:
            job.fail(Trouble.TRANSFER, str(failure))

    def _free(self, job: ServeJob) -> None:
        """No transfer touches the pages: use them for the prompt, or give them back."""
        if job.answered:
            self._engine.cancel(job.id)
            self._engine.release(job.id)
            job.over = True
            return
        job.recomputed = True
        job.report = TransferAccount(room=_ticket(job).room, source=Origin.RECOMPUTED)
        self._engine.recompute(job.id)

    def _arrive(self, job: ServeJob, metadata: bytes) -> None:
        try:
            first = msgspec.msgpack.decode(metadata, type=FirstTokenNote)
            produced = self._engine.arrived(job.id, first.sample)
        except (msgspec.DecodeError, KvferryError) as error:
            job.fail(Trouble.TRANSFER, f"prefill sent no first token that can be used: {error}")
            self._free(job)
            return
        assert job.admitted_at is not None
        tokens = len(job.request.prompt)
        job.report = TransferAccount(
            room=_ticket(job).room,
            source=Origin.TRANSFERRED,
            prefix=job.prefix,
            num_bytes=num_bytes(self._engine.layout, tokens, job.prefix),
            seconds=time.monotonic() - job.admitted_at,
        )
        job.over = produced.finish is not None
        where = (first.http, first.life) if first.http else None
        piece = AnswerPiece(produced.sample, produced.text, produced.finish, job.report, where)
        job.say(piece)

    def stop(self, job: ServeJob) -> None:
        """Take the offer back, if there is one, and wait for the ranks' release."""
        job.answered = True
        pinned = self._engine.cancel(job.id)
        if job.agreement is not None:
            self._abort(job)
            return
        if pinned:
            self._engine.release(job.id)
        job.over = True

    def expire(self, job: ServeJob) -> None:
        """What waits for pages until its transfer is too late need not wait for those."""
        if job.admitted_at is not None or job.recomputed:
            return
        self._fail(job, _TOO_LATE)
        self._engine.cancel(job.id)
        job.over = job.answered
        if not job.answered:
            job.recomputed = True
            job.report = TransferAccount(room=_ticket(job).room, source=Origin.RECOMPUTED)
            job.request = replace(job.request, role=EngineRole.WHOLE)
            self._engine.add(job.request)


_TOO_LATE = Failure(FailureCode.DEADLINE, "decode had no free pages in time; try again later")


def _ticket(job: ServeJob) -> Ticket:
    assert job.ticket is not None
    return job.ticket


def num_bytes(layout: Layout, tokens: int, prefix: int) -> int:
    """What all ranks of a target together receive for a request."""
    total = 0
    for rank in range(layout.num_ranks):
        for holding in layout.rank_shards(rank):
            group = layout.spec.group(holding.group)
            entries = len(group.owed(tokens, prefix)) * len(group.layers_in(holding.layers))
            total += entries * len(holding.units) * group.unit_bytes
    return total
