"""An agreement: how a room stands on all ranks of one instance, from what each has said.

Every rank has an endpoint of its own, and a room ends on each by itself. Whoever drives
the ranks gathers their words by the means that they have anyway (a pipe, a collective, a
scheduler) and asks here. One failure fails the room, all must be done for it to be done,
and its pages are free when they are free on every rank. A rank's first word counts.

Pure: no threads, clocks or transports. Belongs to whoever made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvferry.errors import InputError
from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome, Status


class RankAgreement:
    """What the ranks of this instance have said of one room.

    ``carried`` are the bytes that they have written for it, by mode: complete once all
    have released it, and empty on targets, which write nothing.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise InputError(f"an instance has at least 1 rank, not {num_ranks}")
        self._num_ranks = num_ranks
        self._outcomes: dict[int, Outcome] = {}
        self._released: set[int] = set()
        self.carried: Counter[str] = Counter()

    def end(self, rank: int, outcome: Outcome) -> None:
        """The rank's part of the room is done, or failed: its handle's ``outcome``."""
        self._demand(rank)
        self._outcomes.setdefault(rank, outcome)

    def release(self, rank: int, carried: Mapping[str, int] | None = None) -> None:
        """No transfer touches the rank's pages any more: its handle is ``released``."""
        self._demand(rank)
        if rank not in self._released:
            self._released.add(rank)
            self.carried.update(carried or {})

    @property
    def status(self) -> Status:
        """Failed as soon as one rank has, done when all are."""
        if self.failure is not None:
            return Status.FAILED
        return Status.DONE if len(self._outcomes) == self._num_ranks else Status.MOVING

    @property
    def failure(self) -> Failure | None:
        """Why it failed. Ranks that only followed another's failure say less, so they come last."""
        failures = [end for end in self._outcomes.values() if isinstance(end, Failure)]
        return min(failures, key=lambda f: f.code is FailureCode.ABORTED, default=None)

    @property
    def is_released(self) -> bool:
        """Whether the pages are free on every rank."""
        return len(self._released) == self._num_ranks

    @property
    def metadata(self) -> bytes:
        """What the lead source said; only the targets that it writes to have heard it."""
        said = (end.metadata for end in self._outcomes.values() if isinstance(end, Done))
        return max(said, key=len, default=b"")

    def _demand(self, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise InputError(f"ranks here are 0 to {self._num_ranks - 1}; there is no rank {rank}")
