"""Insight into a rank, beyond what an engine may want to know: read, never changed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvferry.endpoint.source import SourceEndpoint
from kvferry.ids import Room
from kvferry.protocol.states import InboundState
from kvferry.testing.fleet.rooms import RankRooms

T = TypeVar("T")
LOOK_S = 10.0


class Insight:
    """Questions to a rank about its machine's rooms, its peers and itself."""

    def __init__(self, endpoint: Any, rooms: RankRooms) -> None:
        self.endpoint = endpoint
        self._rooms = rooms

    @property
    def _loop(self) -> Any:
        return self.endpoint._loop

    def _look(self, look: Callable[[Any], T]) -> T:
        """Look at the machine on its loop thread, where nothing changes meanwhile."""
        found: Future[T] = Future()

        def call() -> None:
            try:
                found.set_result(look(self._loop.runner.machine))
            except Exception as error:
                found.set_exception(error)

        self._loop.submit(call)
        return found.result(LOOK_S)

    # ------------------------------------------------------------ a room

    def offered_by(self, room: Room) -> list[int]:
        """The targets that have made an offer for a room, opened here or not."""

        def look(machine: Any) -> list[int]:
            return sorted(machine.rooms[room].outbounds) if room in machine.rooms else []

        return self._look(look)

    def _look_at(self, room: Room, look: Callable[[Any], T]) -> T:
        """Look at a room that goes on."""
        outcome = self._rooms.handles[room].outcome
        if outcome is not None:
            raise RuntimeError(f"room {room!r} has ended with {outcome}")
        return self._look(lambda machine: look(machine.rooms[room]))

    def lacks(self, room: Room) -> set[tuple[int, int]]:
        """The tokens that have not arrived, of whatever group or layer."""
        blocks = self._look_at(room, lambda its: its.ledger.lacking())
        return {(block.tokens.first, block.tokens.end) for block in blocks}

    def closed_sources(self, room: Room) -> list[int]:
        """The sources that have said that all is written."""
        inbounds = self._look_at(room, lambda its: [*its.inbounds.values()])
        return [inbound.source for inbound in inbounds if inbound.state is InboundState.CLOSED]

    # ------------------------------------------------------------ the rank

    def peers(self) -> list[str]:
        """Who has a session here."""
        return self._look(lambda machine: [str(link.peer) for link in machine.links.values()])

    def links(self) -> dict[str, str]:
        """The transport of every session, by peer."""
        return self._look(
            lambda machine: {str(link.peer): link.transport for link in machine.links.values()}
        )

    def instances(self) -> set[str]:
        """The prefill instances of which a target keeps anything."""
        side = self._loop.side
        return self._look(
            lambda _: {peer.instance for peer in side.channel.peers} | side.directory.names
        )

    def tables(self) -> dict[str, int]:
        """Sizes of everything that must be empty when nothing goes on."""
        is_source = isinstance(self.endpoint, SourceEndpoint)
        return self._look(self._source_tables if is_source else self._target_tables)

    def _source_tables(self, machine: Any) -> dict[str, int]:
        return {
            "handles": len(self._loop.rooms),
            # Not counting notes of failed rooms, which are kept for a while.
            "rooms": sum(room.known_to_engine for room in machine.rooms.values()),
            "writing": len(machine.inflight.writes),
            "gathered ahead": len(self._loop.side.writes.early),
            "in flight": self._loop.runner.sessions.num_in_flight,
            "slots": machine.config.local_slots - len(machine.local_slots),
        }

    def _target_tables(self, machine: Any) -> dict[str, int]:
        return {
            "handles": len(self._loop.rooms),
            "rooms": len(machine.rooms),
            "scattering": len(machine.scatters),
            "unresolved": len(self._loop.side.directory._waiting),
            "slots": machine.staging.num_slots - len(machine.credits.free),
            "accounts": len(machine.credits.accounts),
        }

    def stats(self) -> Any:
        """The endpoint's counts."""
        return self.endpoint.stats

    def record(self) -> Any:
        """What the source has registered."""
        return self.endpoint.record

    def link_cost(self) -> Any:
        """What the source measured."""
        return self.endpoint.link_cost

    def staging_bytes(self) -> int:
        """What its staging slots take."""
        size: int = self.endpoint.staging_bytes
        return size

    def num_settled(self) -> int:
        """How much of what it holds is never looked at for garbage."""
        return gc.get_freeze_count()

    def cpu_s(self) -> float:
        """Seconds that this process has computed, in all its threads."""
        return time.process_time()

    def keep_traces(self, keep: bool) -> None:
        """Whether the traces of rooms are kept, from the next room on."""
        telemetry = self.endpoint._telemetry
        kept = (telemetry.meter, telemetry.traces) if keep else (telemetry.meter,)
        self._look(lambda _: telemetry.observer.use(*kept))

    def resources(self) -> dict[str, int]:
        """What this process has of the machine's: Linux only."""
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = map(int, file.read().split()[1:3])
        with open("/proc/self/maps", encoding="ascii") as file:
            maps = sum(1 for _ in file)
        return {
            "memory_bytes": (resident - shared) * os.sysconf("SC_PAGE_SIZE"),
            "maps": maps,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }
