"""Costs for the chooser of paths: those of a transport before it is measured, and of each link.

Two links of one transport may cost quite different things, such as NIXL to a neighbour and
over a network, so they are measured for each host that peers are on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.copy.cpu import copy_binding
from kvferry.ids import Session
from kvferry.plan.choose import PRESETS, Constants
from kvferry.plan.places import Base
from kvferry.regions import Device
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.mover.calibration import PIECE_BYTES, SCRATCH_BYTES, scattered
from kvferry.runtime.setup import EndpointSetup
from kvferry.staging import allocate
from kvferry.staging.pool import DEFAULT_SLOT_BYTES
from kvferry.transport.base import Transport

# What a slot costs beside its bytes: a gather, a write, a note and a scatter through two
# processes' queues. Seen on 2 shared cores; a transport's own constants are measured.
SLOT_S = 250e-6
# The same with pools on a GPU: seen on an H200 in 134 slots of 15 MiB.
GPU_SLOT_S = 900e-6
# Costs are measured when a peer connects, but not more often than this for peers of one host.
REMEASURE_S = 30.0
# Of so many hosts costs are kept although nobody is connected there.
MAX_PLACES = 256


def preset_for(transport: str, device: Device) -> str:
    """Whose figures are used before an endpoint has measured its own."""
    where = "host" if device.is_host else "gpu"
    names = (transport, f"{transport}-{where}", f"nixl-{where}")
    return next(name for name in names if name in PRESETS)


def first_constants(config: EndpointConfig, setup: EndpointSetup) -> dict[str, Constants]:
    """What each transport is taken to cost until it was measured."""
    return {transport.name: _first(config, setup, transport) for transport in setup.transports}


def _first(config: EndpointConfig, setup: EndpointSetup, transport: Transport) -> Constants:
    if config.constants is not None:
        return replace(config.constants, maps_peer=transport.maps_peer)
    device = setup.memory.device
    preset = PRESETS[preset_for(transport.name, device)]
    return replace(
        preset,
        copy_bytes_per_s=copy_speed() if device.is_host else preset.copy_bytes_per_s,
        slot_bytes=setup.slots.pool.slot_bytes if setup.slots else DEFAULT_SLOT_BYTES,
        slot_s=SLOT_S if device.is_host else GPU_SLOT_S,
        maps_peer=transport.maps_peer,
    )


class _Place(NamedTuple):
    """Whatever costs the same: a transport, to a host."""

    transport: str
    host: str


class LinkCosts:
    """What writing over each link is taken to cost. Belongs to the owner's thread."""

    def __init__(self, first: Mapping[str, Constants]) -> None:
        self._first = dict(first)
        self._measured: dict[_Place, Constants] = {}
        self._begun_at: dict[_Place, float] = {}
        self._places: dict[Session, _Place] = {}
        # Of the link that was measured last, or of the best transport.
        self.latest = next(iter(self._first.values()))

    def reached(self, session: Session, transport: str, host: str) -> None:
        """A link has its transport, to a peer on that host."""
        self._places[session] = _Place(transport, host)

    def of(self, session: Session) -> Constants:
        """What a link costs; that of the best transport for one that is not reached yet."""
        place = self._places.get(session)
        if place is None:
            return next(iter(self._first.values()))
        return self._measured.get(place, self._first[place.transport])

    def due(self, session: Session, now: float) -> bool:
        """Whether it is time to measure a link; if so, that begins now."""
        place = self._places[session]
        if now < self._begun_at.get(place, -inf) + REMEASURE_S:
            return False
        self._begun_at[place] = now
        return True

    def measured(self, session: Session, constants: Constants) -> None:
        """A link costs this, and so do others like it."""
        place = self._places.get(session)
        if place is not None:
            self._measured[place] = self.latest = constants

    def forget(self, session: Session) -> None:
        """A link is over. What it cost is kept while others are like it."""
        place = self._places.pop(session, None)
        if place is not None and len(self._begun_at) > MAX_PLACES:
            kept = set(self._places.values())
            self._measured = {p: c for p, c in self._measured.items() if p in kept}
            self._begun_at = {p: t for p, t in self._begun_at.items() if p in kept}


@cache
def copy_speed() -> float:
    """Bytes a second that the CPU gathers in small pieces, measured once for a process."""
    from_, into = allocate(2 * SCRATCH_BYTES), allocate(2 * SCRATCH_BYTES)
    pieces = scattered(Base(0, 0, 0), Base(0, 0, 0), SCRATCH_BYTES // PIECE_BYTES)
    addresses = (from_.region.address,), (into.region.address,)
    copy_binding(pieces, *addresses)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        copy_binding(pieces, *addresses)
        seconds.append(time.perf_counter() - begin)
    return SCRATCH_BYTES / min(seconds)
