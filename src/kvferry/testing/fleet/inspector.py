"""Inspector of a rank: reads the state of its machine and process, and changes nothing."""

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
from kvferry.telemetry.steps import RoomTrace

T = TypeVar("T")
LOOK_S = 10.0


class RankInspector:
    """Questions about the rooms, peers and tables of a rank, and about its process."""

    def __init__(self, endpoint: Any, handles: dict[Room, Any]) -> None:
        self._endpoint = endpoint
        self._handles = handles

    @property
    def _loop(self) -> Any:
        return self._endpoint._loop

    def _look(self, look: Callable[[Any], T]) -> T:
        """Call ``look`` with the machine on the loop's thread, where nothing else changes it."""
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
        """Return the targets that have offered a room, whether it is open here or not."""

        def look(machine: Any) -> list[int]:
            return sorted(machine.rooms[room].outbounds) if room in machine.rooms else []

        return self._look(look)

    def _look_at(self, room: Room, look: Callable[[Any], T]) -> T:
        """Look at a room that has not ended."""
        outcome = self._handles[room].outcome
        if outcome is not None:
            raise RuntimeError(f"room {room!r} has ended with {outcome}")
        return self._look(lambda machine: look(machine.rooms[room]))

    def lacks(self, room: Room) -> set[tuple[int, int]]:
        """Return the tokens that have not arrived, of any group and layer."""
        blocks = self._look_at(room, lambda its: its.ledger.lacking())
        return {(block.tokens.first, block.tokens.end) for block in blocks}

    def closed_sources(self, room: Room) -> list[int]:
        """Return the sources that have closed a room."""
        inbounds = self._look_at(room, lambda its: [*its.inbounds.values()])
        return [inbound.source for inbound in inbounds if inbound.state is InboundState.CLOSED]

    # ------------------------------------------------------------ the endpoint

    def peers(self) -> list[str]:
        """Return the peers that have a session with this rank."""
        return self._look(lambda machine: [str(link.peer) for link in machine.links.values()])

    def links(self) -> dict[str, str]:
        """Return the transport of every session, by peer."""
        return self._look(
            lambda machine: {str(link.peer): link.transport for link in machine.links.values()}
        )

    def instances(self) -> set[str]:
        """Return the prefill instances of which a target keeps anything."""
        channel, directory = self._loop.side.channel, self._loop.side.directory
        return self._look(
            lambda _: {
                *(peer.instance for peer in channel.peers),
                *directory._views,
                *directory._watches,
            }
        )

    def tables(self) -> dict[str, int]:
        """Return the sizes of the tables that must be empty when nothing is in progress."""
        is_source = isinstance(self._endpoint, SourceEndpoint)
        return self._look(self._source_tables if is_source else self._target_tables)

    def _source_tables(self, machine: Any) -> dict[str, int]:
        return {
            "handles": len(self._loop.rooms),
            # Without the records of failed rooms, which are kept for a while.
            "rooms": sum(room.known_to_engine for room in machine.rooms.values()),
            "writes": len(machine.inflight.writes),
            "early gathers": len(self._loop.side.writes.early),
            "in flight": len(self._loop.runner.sessions.by_op),
            "slots": machine.config.local_slots - len(machine.inflight.slots),
        }

    def _target_tables(self, machine: Any) -> dict[str, int]:
        return {
            "handles": len(self._loop.rooms),
            "rooms": len(machine.rooms),
            "scatters": len(machine.scatters.under_way),
            "unresolved": len(self._loop.side.directory._waiting),
            "slots": machine.staging.num_slots - len(machine.credits.free),
            "accounts": len(machine.credits.accounts),
        }

    def keep_traces(self, keep: bool) -> None:
        """Turn the traces of rooms on or off, from the next room on."""
        telemetry = self._endpoint._telemetry
        kept = (telemetry.meter, telemetry.traces) if keep else (telemetry.meter,)
        self._look(lambda _: telemetry.observer.use(*kept))

    def trace(self, room: Room) -> RoomTrace | None:
        """Return the trace of a recent room; None if it is not kept."""
        trace: RoomTrace | None = self._endpoint.trace(room)
        return trace

    # ------------------------------------------------------------ the process

    def num_frozen(self) -> int:
        """Return the number of objects that the garbage collector skips."""
        return gc.get_freeze_count()

    def cpu_s(self) -> float:
        """Return the processor time of this process, in seconds."""
        return time.process_time()

    def resources(self) -> dict[str, int]:
        """Return this process's memory, mappings, files and threads. Linux only."""
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
