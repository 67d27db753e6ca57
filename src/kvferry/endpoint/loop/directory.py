"""The directory of a target: prefill instances as far as they are known, and who waits for one.

An instance comes from the discovery service, which is watched while somebody needs it, or with a
room, from an engine that knows better. A room waits for one until its deadline, and for one that
discovery says is not there no longer than ``discovery_timeout_s``: a name may be anybody's
invention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import InstanceView
from kvferry.endpoint.incoming import Incoming
from kvferry.ids import Peer, Room

# Rooms to tell one instance of, once it is found. Of more, it learns by its own deadline.
MAX_UNWANTED = 4096


class Directory:
    """``tell`` is called on the discovery client's thread, everything else on the owner's."""

    def __init__(
        self,
        client: DiscoveryClient | None,
        tell: Callable[[str, InstanceView | None], None],
        discovery_timeout_s: float = inf,
    ) -> None:
        self._client = client
        self._tell = tell
        self._find_s = discovery_timeout_s
        self._absent: set[str] = set()
        self._views: dict[str, InstanceView] = {}
        self._watches: dict[str, Callable[[InstanceView | None], None]] = {}
        self._waiting: dict[str, dict[Room, Incoming]] = {}
        # Rooms that an instance is to be told nobody wants, and until when that makes sense.
        self._unwanted: dict[str, dict[Room, float]] = {}

    @property
    def names(self) -> set[str]:
        """The instances of which anything is kept."""
        return {*self._views, *self._watches}

    def address_of(self, peer: Peer) -> str | None:
        """Where a source listens."""
        view = self._views.get(peer.instance)
        if view is None or peer.rank >= len(view.ranks):
            return None
        return view.ranks[peer.rank].control

    def find(self, handle: Incoming) -> InstanceView | None:
        """The instance that a room wants; None if it has to wait for it."""
        prefill = handle.prefill
        if isinstance(prefill, InstanceView):
            self.keep(prefill)
            return prefill
        view = self._views.get(prefill)
        if view is None:
            self._wait(prefill, handle)
        return view

    def keep(self, view: InstanceView) -> None:
        """An engine has described an instance."""
        self._views[view.name] = view

    def _wait(self, name: str, handle: Incoming) -> None:
        self._waiting.setdefault(name, {})[handle.room] = handle
        self._watch(name)

    def _watch(self, name: str) -> None:
        assert self._client is not None
        if name not in self._watches:
            self._watches[name] = partial(self._tell, name)
            self._client.watch(name, self._watches[name], eager=True)

    def find_for_unwanted(self, room: Room, prefill: str, until: float) -> InstanceView | None:
        """The instance of a room that nobody here wants; None if it is to be told when found."""
        view = self._views.get(prefill)
        if view is None:
            rooms = self._unwanted.setdefault(prefill, {})
            rooms[room] = until
            if len(rooms) > MAX_UNWANTED:
                del rooms[next(iter(rooms))]
            self._watch(prefill)
        return view

    def unwanted_at(self, name: str) -> list[Room]:
        """Rooms that an instance, which has just been found, is to be told of."""
        return list(self._unwanted.pop(name, {}))

    def learn(self, name: str, view: InstanceView | None) -> list[Incoming]:
        """An instance is complete, has changed, or has ended: who need not wait any longer?"""
        if name not in self._watches:
            # Said while we stopped listening. It would never be taken back.
            return []
        if view is None:
            self._views.pop(name, None)
            self._absent.add(name)
            return []
        self._absent.discard(name)
        self._views[name] = view
        return list(self._waiting.pop(name, {}).values())

    def give_up(self, handle: Incoming) -> bool:
        """A room ends before its instance was found; whether it was waiting."""
        name = str(handle.prefill)
        waiting = self._waiting.get(name, {})
        if waiting.get(handle.room) is not handle:
            return False
        del waiting[handle.room]
        if not waiting:
            del self._waiting[name]
        return True

    def overdue(self, now: float) -> list[Incoming]:
        """Rooms whose instance was not found in time."""
        for name, rooms in list(self._unwanted.items()):
            self._unwanted[name] = {room: until for room, until in rooms.items() if until > now}
            if not self._unwanted[name]:
                del self._unwanted[name]
        return [handle for until, handle in self._limits() if now >= until]

    def wakeup(self) -> float:
        """When the first of the waiting rooms has to end."""
        return min((until for until, _ in self._limits()), default=inf)

    def _limits(self) -> Iterator[tuple[float, Incoming]]:
        """Until when each room waits for its instance."""
        for name, rooms in self._waiting.items():
            discovery_timeout_s = self._find_s if name in self._absent else inf
            for handle in rooms.values():
                yield min(handle.deadline, handle.begun + discovery_timeout_s), handle

    def problem(self, name: str) -> str:
        """Why an instance that is waited for is not there."""
        assert self._client is not None
        return self._client.problem(name)

    def forget_ended(self, linked: set[str]) -> set[str]:
        """Let go of what nobody needs; the instances that are still needed.

        Instances come and go; what is kept of one goes when it has left and has no links.
        """
        for name in self._views.keys() - self._watches.keys() - linked:
            # Given by the engine, which gives it again.
            del self._views[name]
        needed = {*linked, *self._views, *self._waiting, *self._unwanted}
        for name in self._watches.keys() - needed:
            assert self._client is not None
            self._absent.discard(name)
            self._client.unwatch(name, self._watches.pop(name))
        return needed
