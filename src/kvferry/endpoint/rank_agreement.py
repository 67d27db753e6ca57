"""Combines the outcomes of one room at all ranks of an instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvferry.errors import InputError
from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome, Status


class RankAgreement:
    """State of one room over ``num_ranks`` ranks. Not thread-safe.

    The program that drives the ranks collects their outcomes by its own means, such as a pipe.
    One failure fails the room; it is done when all ranks are done; its pages are free when they
    are free on every rank. Only the first outcome of a rank counts. ``carried`` has the bytes
    written by mode: final once all ranks have released the room, and empty on targets.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise InputError(f"num_ranks must be at least 1, not {num_ranks}")
        self._num_ranks = num_ranks
        self._outcomes: dict[int, Outcome] = {}
        self._released: set[int] = set()
        self.carried: Counter[str] = Counter()

    def end(self, rank: int, outcome: Outcome) -> None:
        """Add the outcome of a rank's handle. Raises ``InputError`` for an unknown rank."""
        self._check_rank(rank)
        self._outcomes.setdefault(rank, outcome)

    def release(self, rank: int, carried: Mapping[str, int] | None = None) -> None:
        """Note that a rank's handle is ``released``, and add the bytes that it carried."""
        self._check_rank(rank)
        if rank not in self._released:
            self._released.add(rank)
            self.carried.update(carried or {})

    @property
    def status(self) -> Status:
        """Failed as soon as one rank has failed, done when all are done, else moving."""
        if self.failure is not None:
            return Status.FAILED
        return Status.DONE if len(self._outcomes) == self._num_ranks else Status.MOVING

    @property
    def failure(self) -> Failure | None:
        """The most specific failure: ``aborted`` ranks often only followed another's failure."""
        failures = [end for end in self._outcomes.values() if isinstance(end, Failure)]
        return min(failures, key=lambda f: f.code is FailureCode.ABORTED, default=None)

    @property
    def is_released(self) -> bool:
        """Whether the pages are free on every rank."""
        return len(self._released) == self._num_ranks

    @property
    def pulled(self) -> int:
        """First tokens that a pull has brought to every rank that is done."""
        found = (end.pulled for end in self._outcomes.values() if isinstance(end, Done))
        return min((tokens for tokens in found if tokens is not None), default=0)

    @property
    def metadata(self) -> bytes:
        """The lead source's metadata, which reaches only the targets that it writes to."""
        found = (end.metadata for end in self._outcomes.values() if isinstance(end, Done))
        return max(found, key=len, default=b"")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise InputError(f"rank must be from 0 to {self._num_ranks - 1}, not {rank}")
