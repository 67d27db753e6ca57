"""The directory of a target: known prefill instances, and rooms that wait for one.

An instance is known from the discovery service, which is watched while a room needs it, or from the
engine, which may pass a view of it. A room waits for its instance until its deadline. If discovery
says that the instance does not exist, it waits at most ``discovery_timeout_s``: the name may be a
client's invention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import InstanceView
from kvferry.endpoint.incoming import Incoming
from kvferry.ids import Peer, Room

# Declined rooms to remember for one instance that is not known yet. The instance learns of others
# by their deadline.
MAX_DECLINED = 4096


class Directory:
    """Instances by name. For the loop thread; discovery's thread calls ``on_view``."""

    def __init__(
        self,
        client: DiscoveryClient | None,
        on_view: Callable[[str, InstanceView | None], None],
        discovery_timeout_s: float = inf,
    ) -> None:
        self._client = client
        self._on_view = on_view
        self._timeout_s = discovery_timeout_s
        self._absent: set[str] = set()
        self._views: dict[str, InstanceView] = {}
        self._watches: dict[str, Callable[[InstanceView | None], None]] = {}
        self._waiting: dict[str, dict[Room, Incoming]] = {}
        # Rooms to decline once their instance is known, and until when that makes sense.
        self._declined: dict[str, dict[Room, float]] = {}

    @property
    def names(self) -> set[str]:
        """Instances that are known or watched."""
        return {*self._views, *self._watches}

    def address_of(self, peer: Peer) -> str | None:
        """Return a source's control address, if its instance is known."""
        view = self._views.get(peer.instance)
        if view is None or peer.rank >= len(view.ranks):
            return None
        return view.ranks[peer.rank].control

    def find(self, handle: Incoming) -> InstanceView | None:
        """Return a room's instance. If it is not known, the room waits, and this returns None."""
        prefill = handle.prefill
        if isinstance(prefill, InstanceView):
            self.add(prefill)
            return prefill
        view = self._views.get(prefill)
        if view is None:
            self._waiting.setdefault(prefill, {})[handle.room] = handle
            self._watch(prefill)
        return view

    def add(self, view: InstanceView) -> None:
        """Store a view that the engine passed."""
        self._views[view.name] = view

    def _watch(self, name: str) -> None:
        assert self._client is not None
        if name not in self._watches:
            self._watches[name] = partial(self._on_view, name)
            self._client.watch(name, self._watches[name], eager=True)

    def find_for_declined(self, room: Room, prefill: str, until: float) -> InstanceView | None:
        """Return the instance of a declined room. If it is not known, remember the room."""
        view = self._views.get(prefill)
        if view is None:
            rooms = self._declined.setdefault(prefill, {})
            rooms[room] = until
            if len(rooms) > MAX_DECLINED:
                del rooms[next(iter(rooms))]
            self._watch(prefill)
        return view

    def take_declined(self, name: str) -> list[Room]:
        """Remove and return the rooms to decline at an instance that is now known."""
        return list(self._declined.pop(name, {}))

    def update(self, name: str, view: InstanceView | None) -> list[Incoming]:
        """Store a view from discovery; None if the instance is not complete.

        Return the rooms that waited for it.
        """
        if name not in self._watches:
            # Sent before the watch ended. It would never be updated.
            return []
        if view is None:
            self._views.pop(name, None)
            self._absent.add(name)
            return []
        self._absent.discard(name)
        self._views[name] = view
        return list(self._waiting.pop(name, {}).values())

    def remove_waiting(self, handle: Incoming) -> bool:
        """Remove a room that ends before its instance was found. Return whether it waited."""
        name = str(handle.prefill)
        waiting = self._waiting.get(name, {})
        if waiting.get(handle.room) is not handle:
            return False
        del waiting[handle.room]
        if not waiting:
            del self._waiting[name]
        return True

    def overdue(self, now: float) -> list[Incoming]:
        """Return rooms whose instance was not found in time. Drops expired declined rooms."""
        for name, rooms in list(self._declined.items()):
            self._declined[name] = {room: until for room, until in rooms.items() if until > now}
            if not self._declined[name]:
                del self._declined[name]
        return [handle for until, handle in self._deadlines() if now >= until]

    def wakeup(self) -> float:
        """Return when the first waiting room becomes overdue."""
        return min((until for until, _ in self._deadlines()), default=inf)

    def _deadlines(self) -> Iterator[tuple[float, Incoming]]:
        for name, rooms in self._waiting.items():
            timeout_s = self._timeout_s if name in self._absent else inf
            for handle in rooms.values():
                yield min(handle.deadline, handle.begun + timeout_s), handle

    def problem(self, name: str) -> str:
        """Return why an instance is not known."""
        assert self._client is not None
        return self._client.problem(name)

    def drop_unused(self, linked: set[str]) -> set[str]:
        """Drop instances that no link or room needs. Return those that are still needed."""
        for name in self._views.keys() - self._watches.keys() - linked:
            # The engine passed this view, and passes it again with the next room.
            del self._views[name]
        needed = {*linked, *self._views, *self._waiting, *self._declined}
        for name in self._watches.keys() - needed:
            assert self._client is not None
            self._absent.discard(name)
            self._client.unwatch(name, self._watches.pop(name))
        return needed
