"""What source and target endpoints have in common, as an engine sees them."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from kvferry.ids import Peer, Room
from kvferry.protocol.outcome import Status
from kvferry.rendezvous.client import RendezvousClient
from kvferry.runtime.lifeline import Address
from kvferry.runtime.metrics import Stats
from kvferry.runtime.owner import CLOSE_S, Owner

OwnerT = TypeVar("OwnerT", bound=Owner[Any])


class RankEndpoint(Generic[OwnerT]):
    """One rank's end of every transfer that it takes part in. For any thread."""

    def __init__(self, owner: OwnerT, client: RendezvousClient | None) -> None:
        self._owner = owner
        self._client = client

    @property
    def stats(self) -> Stats:
        """What was carried and how, since the start."""
        return self._owner.stats

    @property
    def staging_bytes(self) -> int:
        """Memory taken beside the pools."""
        return self._owner.staging_bytes

    @property
    def lifeline(self) -> Address:
        """Where peers ask whether this life of the endpoint goes on."""
        return self._owner.lifeline_address

    def statuses(self, rooms: Iterable[Room]) -> list[Status | None]:
        """Where many rooms stand, for a scheduler's loop; None once they are released."""
        return self._owner.statuses(rooms)

    def vouch_gone(self, peer: Peer, incarnation: int) -> None:
        """The caller knows that this life of a peer is over, such as after a power cut.

        Releases what waits for it. Never say this of a process that may only be stopped.
        """
        self._owner.told_gone(peer, incarnation)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Abort what goes on, end the threads, and say whether all memory is free.

        False: a peer may still write or read the pools. Keep them until the process ends.
        """
        free = self._owner.close(timeout_s)
        if self._client:
            # Last: until then the owner may want to stop watching an instance.
            self._client.close()
        return free

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
