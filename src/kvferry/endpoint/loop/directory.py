"""The directory of a target: known prefill instances, and rooms that wait for one.

An instance is known from the discovery service, which is watched while a room needs it, or from the
engine, which may pass a view of it. A room waits for its instance until its deadline. If discovery
says that the instance does not exist, it waits at most ``discovery_timeout_s``: the name may be a
client's invention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import InstanceView
from kvferry.endpoint.incoming import Incoming
from kvferry.ids import Peer, Room

# Declined rooms to remember for one instance that is not known yet. The instance learns of others
# by their deadline.
MAX_DECLINED = 4096


@dataclass(eq=False)
class Directory:
    """Instances by name. For the loop thread; discovery's thread calls ``on_view``."""

    client: DiscoveryClient | None
    on_view: Callable[[str, InstanceView | None], None]
    discovery_timeout_s: float = inf
    _absent: set[str] = field(default_factory=set)
    _views: dict[str, InstanceView] = field(default_factory=dict)
    _watches: dict[str, Callable[[InstanceView | None], None]] = field(default_factory=dict)
    _waiting: dict[str, dict[Room, Incoming]] = field(default_factory=dict)
    # Rooms to decline once their instance is known, and until when that makes sense.
    _declined: dict[str, dict[Room, float]] = field(default_factory=dict)

    def address_of(self, peer: Peer) -> str | None:
        """Return a source's control address, if its instance is known."""
        view = self._views.get(peer.instance)
        if view is None or peer.rank >= len(view.ranks):
            return None
        return view.ranks[peer.rank].control

    def has(self, view: InstanceView) -> bool:
        """Return whether this view is the known one."""
        return self._views.get(view.name) is view

    def find(self, handle: Incoming) -> InstanceView | None:
        """Return a room's instance. If it is not known, the room waits, and this returns None."""
        view = self._known(handle.prefill)
        if view is None:
            self._waiting.setdefault(str(handle.prefill), {})[handle.room] = handle
        return view

    def find_for_declined(
        self, room: Room, prefill: str | InstanceView, until: float
    ) -> InstanceView | None:
        """Return the instance of a declined room. If it is not known, remember the room."""
        view = self._known(prefill)
        if view is None:
            rooms = self._declined.setdefault(str(prefill), {})
            rooms[room] = until
            if len(rooms) > MAX_DECLINED:
                del rooms[next(iter(rooms))]
        return view

    def _known(self, prefill: str | InstanceView) -> InstanceView | None:
        """Return the view that the engine gave or that discovery has reported, or watch for one."""
        if isinstance(prefill, InstanceView):
            self._views[prefill.name] = prefill
            return prefill
        if prefill not in self._views and prefill not in self._watches:
            assert self.client is not None
            self._watches[prefill] = partial(self.on_view, prefill)
            self.client.watch(prefill, self._watches[prefill], eager=True)
        return self._views.get(prefill)

    def update(self, name: str, view: InstanceView | None) -> tuple[list[Incoming], list[Room]]:
        """Store a view from discovery. Return the rooms that waited for it: to open, to decline."""
        if name not in self._watches:
            # Sent before the watch ended. It would never be updated.
            return [], []
        if view is None:
            self._views.pop(name, None)
            self._absent.add(name)
            return [], []
        self._absent.discard(name)
        self._views[name] = view
        return [*self._waiting.pop(name, {}).values()], [*self._declined.pop(name, {})]

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
            timeout_s = self.discovery_timeout_s if name in self._absent else inf
            for handle in rooms.values():
                yield min(handle.deadline, handle.begun + timeout_s), handle

    def drop_unused(self, linked: set[str]) -> set[str]:
        """Drop instances that no link or room needs. Return those that are still needed."""
        needed = {*linked, *self._waiting, *self._declined}
        for name in self._views.keys() - needed:
            # The next room watches it again, or the engine passes it again.
            del self._views[name]
        for name in self._watches.keys() - needed:
            assert self.client is not None
            self._absent.discard(name)
            self.client.unwatch(name, self._watches.pop(name))
        return needed
