"""The cost model: predicts the time of a transfer from a link's costs.

Every constant that predicts a time is here. ``kvferry plan`` and ``kvferry doctor`` predict with
the presets. An endpoint starts with the same presets, and replaces them in a ``LinkCostTable`` by
what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.ids import Session
from kvferry.plan.units import MIB
from kvferry.regions import PAGE_BYTES, Device

# ---------------------------------------------------------------- staging slots


class SlotRule(NamedTuple):
    """The staging memory on one kind of device: its default size, and the cost and size of slots.

    ``slot_s`` is the fixed cost of a slot: messages and thread switches. Slots above ``max_bytes``
    are no faster. With ``enough`` slots, copies and writes overlap.
    """

    budget_bytes: int
    slot_s: float
    max_bytes: int
    enough: int

    def slot_bytes(self, budget_bytes: int | None = None) -> int:
        """Return the default size of a slot for a staging budget, or for the default budget."""
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        return min(self.max_bytes, budget // self.enough // PAGE_BYTES * PAGE_BYTES)


# 0.25 ms: gather, write, notification and scatter through the queues of two processes, measured on
# a host with 2 shared cores (docs/adr/0012). One slot is filled while others are sent and drained.
HOST_SLOTS = SlotRule(budget_bytes=64 * MIB, slot_s=250e-6, max_bytes=16 * MIB, enough=4)
# 0.6 ms: measured on an H200 with slots of 64 to 512 MiB. A GPU copies a slot in less time than its
# messages take, so it gets fewer slots, which grow with the budget.
GPU_SLOTS = SlotRule(budget_bytes=128 * MIB, slot_s=600e-6, max_bytes=256 * MIB, enough=2)


def slots_on(device: Device) -> SlotRule:
    """Return the rule for staging slots on a device."""
    return HOST_SLOTS if device.is_host else GPU_SLOTS


# ---------------------------------------------------------------- cost of a link

# Sizes of the pieces that are measured: typical of a slice, and of a run of pages.
SMALL_PIECE_BYTES, LARGE_PIECE_BYTES = 1 << 10, 64 << 10


# 0.6 ms: p50 of ``kvferry bench control --transport shm`` on 2 cores, one room at a time.
ROOM_S = 600e-6


class LinkCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a transport between two machines.

    ``write_s`` is the fixed cost of a write. ``descriptor_s`` is the cost of a piece of up to
    1 KiB, ``run_s`` that of a piece of 64 KiB or more if it differs. ``maps_peer`` says that the
    source writes into mapped memory of the target, so nothing is staged. ``room_s`` is the time of
    a room beside its bytes: messages and thread switches. ``kvferry bench control`` measures it.
    """

    descriptor_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    slot_bytes: int = HOST_SLOTS.slot_bytes()
    slot_s: float = HOST_SLOTS.slot_s
    maps_peer: bool = False
    write_s: float = 0.0
    run_s: float | None = None
    room_s: float = ROOM_S

    def __post_init__(self) -> None:
        speeds = (self.bytes_per_s, self.copy_bytes_per_s, self.slot_bytes)
        if not all(0 < speed < math.inf for speed in speeds):
            raise InputError("bandwidth, copy speed and slot size must be above 0 and finite")
        costs = (self.descriptor_s, self.slot_s, self.write_s, self.run_s or 0.0, self.room_s)
        if not all(0 <= cost < math.inf for cost in costs):
            raise InputError("costs in seconds must be 0 or more and finite")

    def num_slots(self, num_bytes: int) -> int:
        """Return the number of slots, and so of bulk writes, for a payload."""
        return -(-num_bytes // self.slot_bytes)

    def wire_s(self, num_bytes: int) -> float:
        """Return the seconds that the bytes take on the wire."""
        return num_bytes / self.bytes_per_s

    def direct_s(self, num_pieces: int, num_bytes: int) -> float:
        """Return the seconds of one write of many pieces without staging."""
        return self.write_s + self.pieces_s(num_pieces, num_bytes) + self.wire_s(num_bytes)

    def staged_s(self, num_bytes: int) -> float:
        """Return the seconds of a transfer through staging slots.

        Gather and scatter count in full. They overlap with the writes of other slots, but on one
        host all three share the memory bandwidth, so leaving them out would favour staging.
        """
        copies_s = 2 * num_bytes / self.copy_bytes_per_s
        slots = self.num_slots(num_bytes)
        slots_s = slots * (self.slot_s + self.write_s) + self.pieces_s(slots, num_bytes)
        return slots_s + copies_s + self.wire_s(num_bytes)

    def pieces_s(self, num_pieces: int, num_bytes: int) -> float:
        """Return the seconds for descriptors, interpolated by the mean size of a piece."""
        if self.run_s is None or not num_pieces:
            return num_pieces * self.descriptor_s
        mean = min(max(num_bytes / num_pieces, SMALL_PIECE_BYTES), LARGE_PIECE_BYTES)
        share = math.log(mean / SMALL_PIECE_BYTES) / math.log(LARGE_PIECE_BYTES / SMALL_PIECE_BYTES)
        return num_pieces * (self.descriptor_s + share * (self.run_s - self.descriptor_s))


# ---------------------------------------------------------------- presets


_gpu_cost = partial(LinkCost, slot_bytes=GPU_SLOTS.slot_bytes(), slot_s=GPU_SLOTS.slot_s)

# Used by ``kvferry plan --cost-model``, and by endpoints until they have measured the link.
#   nixl-host    measured: NIXL 1.5.1, UCX with CMA, host memory, loopback, 2 cores
#   nixl-gpu     measured: the same over cuda_ipc between two processes on one H200
#   mooncake     measured: Mooncake 0.3.13, TCP on loopback, 2 cores
#   shm          measured: strided copies into the target's mapped pool (docs/adr/0008), 2 cores
#   cuda         measured: the same between processes on one H200, all pieces in one launch
#   rdma-400g    assumed, not measured: a 400 Gb/s NIC per rank, GPU memory at both ends
PRESETS = {
    "nixl-host": LinkCost(descriptor_s=3e-6, bytes_per_s=6.5e9, copy_bytes_per_s=7e9),
    "nixl-gpu": _gpu_cost(descriptor_s=7.6e-6, bytes_per_s=1.19e12, copy_bytes_per_s=1.78e12),
    "mooncake": LinkCost(descriptor_s=50e-6, bytes_per_s=1e9, copy_bytes_per_s=7e9),
    "shm": LinkCost(descriptor_s=3e-9, bytes_per_s=7e9, copy_bytes_per_s=7e9, maps_peer=True),
    "cuda": _gpu_cost(descriptor_s=0, bytes_per_s=1.8e12, copy_bytes_per_s=1.8e12, maps_peer=True),
    "rdma-400g": _gpu_cost(descriptor_s=1e-6, bytes_per_s=46e9, copy_bytes_per_s=1.78e12),
}
# The bytes that nixl-host sends in the time of a descriptor, rounded down to a power of two. NIXL's
# writes are cut into batches by it.
NIXL_DESCRIPTOR_BYTES = 16 << 10


def preset_for(transport: str, device: Device) -> str:
    """Return the name of the preset for a transport on a device."""
    where = "host" if device.is_host else "gpu"
    names = (transport, f"{transport}-{where}", f"nixl-{where}")
    return next(name for name in names if name in PRESETS)


def default_link_cost(
    transport: str,
    device: Device,
    *,
    slot_bytes: int | None = None,
    copy_bytes_per_s: float | None = None,
    maps_peer: bool | None = None,
) -> LinkCost:
    """Return the link cost that an endpoint uses until it has measured a link.

    The endpoint passes what it knows: the size of its slots, the measured speed of its copies,
    whether its transport maps the peer. The preset gives the rest.
    """
    preset, slots = PRESETS[preset_for(transport, device)], slots_on(device)
    return replace(
        preset,
        # The preset may be for another device: mooncake has one for both.
        slot_bytes=slots.slot_bytes() if slot_bytes is None else slot_bytes,
        slot_s=slots.slot_s,
        copy_bytes_per_s=preset.copy_bytes_per_s if copy_bytes_per_s is None else copy_bytes_per_s,
        maps_peer=preset.maps_peer if maps_peer is None else maps_peer,
    )


# ---------------------------------------------------------------- pushes

# Fixed cost of a push: time on the engine's thread, and time until an empty write is acknowledged.
# Estimates for 2 cores; a fast host needs less.
PUSH_CALL_S = 60e-6
PUSH_WRITE_S = 300e-6


# ---------------------------------------------------------------- measured links

# A link is measured when a peer connects, but at most this often for peers on one host.
REMEASURE_S = 30.0
# Number of routes whose cost is kept although no peer is connected.
MAX_IDLE_ROUTES = 256


class _Route(NamedTuple):
    """A transport and the peer's host. Links of one route cost the same."""

    transport: str
    host: str


class LinkCostTable:
    """Measured costs of a source's links, by session. Presets until a link is measured.

    The first preset is that of the preferred transport. Links of one transport may differ, such as
    NIXL on one host and over a network, so each host is measured separately.
    """

    def __init__(self, presets: Mapping[str, LinkCost]) -> None:
        self._presets = dict(presets)
        self._measured: dict[_Route, LinkCost] = {}
        self._started_at: dict[_Route, float] = {}
        self._routes: dict[Session, _Route] = {}
        # The latest measurement of any link, or else the preferred transport's preset.
        self.latest = next(iter(self._presets.values()))

    def add(self, session: Session, transport: str, host: str) -> None:
        """Register a link with its transport and the host of its peer."""
        self._routes[session] = _Route(transport, host)

    def of(self, session: Session) -> LinkCost:
        """Return the cost of a link, or the preferred transport's preset before ``add``."""
        route = self._routes.get(session)
        if route is None:
            return next(iter(self._presets.values()))
        return self._measured.get(route, self._presets[route.transport])

    def start_if_due(self, session: Session, now: float) -> bool:
        """Return whether to measure a link now, and if so record the start."""
        route = self._routes[session]
        if now < self._started_at.get(route, -math.inf) + REMEASURE_S:
            return False
        self._started_at[route] = now
        return True

    def record(self, session: Session, link_cost: LinkCost) -> None:
        """Record a measurement, for this link and for others of the same route."""
        route = self._routes.get(session)
        if route is not None:
            self._measured[route] = self.latest = link_cost

    def forget(self, session: Session) -> None:
        """Remove a closed link. Its route's measurement is kept within a limit."""
        route = self._routes.pop(session, None)
        if route is not None and len(self._started_at) > MAX_IDLE_ROUTES:
            kept = set(self._routes.values())
            self._measured = {p: c for p, c in self._measured.items() if p in kept}
            self._started_at = {p: t for p, t in self._started_at.items() if p in kept}
