"""The cost model: what a transfer costs, as constants and as rules over them. Pure.

Every number that predicts a time is here. ``kvferry plan`` and ``kvferry doctor`` predict with
the presets, and an endpoint chooses by the same ones until it has measured a link; then
``LinkCostTable`` keeps the measured constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.ids import Session
from kvferry.plan.units import MIB
from kvferry.regions import HOST, PAGE_BYTES, Device

# ---------------------------------------------------------------- staging slots

# Default of ``EndpointConfig.staging_bytes``; the default slot sizes follow from it.
DEFAULT_BUDGET_BYTES = 64 * MIB


class SlotRule(NamedTuple):
    """Staging slots on one kind of device: what each costs, and so how large to make them.

    ``slot_s`` is the cost of a slot beside its bytes: messages and changes of threads. Slots
    above ``most_bytes`` gain nothing; with ``enough`` slots, copies and writes overlap.
    """

    slot_s: float
    most_bytes: int
    enough: int

    def slot_bytes(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> int:
        """Return the size of a slot that an endpoint with that budget takes by default."""
        share = budget_bytes // self.enough // PAGE_BYTES * PAGE_BYTES
        return min(self.most_bytes, share)


# 0.25 ms: a gather, a write, a note and a scatter through the queues of two processes, seen on
# a host of 2 shared cores (docs/adr/0012). One slot is filled while others are sent and drained.
HOST_SLOTS = SlotRule(slot_s=250e-6, most_bytes=16 * MIB, enough=4)
# 0.9 ms: seen on an H200, in 134 slots of 15 MiB. A GPU copies a slot in less time than its
# messages take, so it has fewer slots, which grow with the budget.
GPU_SLOTS = SlotRule(slot_s=900e-6, most_bytes=256 * MIB, enough=3)


def slots_on(device: Device) -> SlotRule:
    """Return the rule for staging slots on a device."""
    return HOST_SLOTS if device.is_host else GPU_SLOTS


# ---------------------------------------------------------------- a link's constants

# Pieces of these sizes are measured: those of a slice, and those of a page's run.
SMALL_PIECE_BYTES, LARGE_PIECE_BYTES = 1 << 10, 64 << 10


class LinkCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a transport on one machine.

    ``write_s`` is what a write costs however large it is. ``descriptor_s`` is for pieces of
    1 KiB and less, ``run_s`` for those of 64 KiB and more, where that differs.
    ``maps_peer``: the source writes straight into the target's mapped memory, so there is
    nothing to stage. Slots are those of host memory unless given.
    """

    descriptor_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    slot_bytes: int = HOST_SLOTS.slot_bytes()
    slot_s: float = HOST_SLOTS.slot_s
    maps_peer: bool = False
    write_s: float = 0.0
    run_s: float | None = None

    def __post_init__(self) -> None:
        speeds = (self.bytes_per_s, self.copy_bytes_per_s, self.slot_bytes)
        if not all(0 < speed < math.inf for speed in speeds):
            raise InputError("bandwidth, copy speed and slot size must be above 0 and finite")
        costs = (self.descriptor_s, self.slot_s, self.write_s, self.run_s or 0.0)
        if not all(0 <= cost < math.inf for cost in costs):
            raise InputError("the cost of a descriptor and of a slot is 0 or more, and finite")

    def num_slots(self, num_bytes: int) -> int:
        """Return how many slots so many bytes fill, and so how many bulk writes they take."""
        return -(-num_bytes // self.slot_bytes)

    def wire_s(self, num_bytes: int) -> float:
        """Return what the bytes of a write take."""
        return num_bytes / self.bytes_per_s

    def direct_s(self, num_pieces: int, num_bytes: int) -> float:
        """Return what one write takes that goes straight into place, in so many pieces."""
        return self.write_s + self.pieces_s(num_pieces, num_bytes) + self.wire_s(num_bytes)

    def staged_s(self, num_bytes: int) -> float:
        """Return what so many bytes take through slots.

        Gather and scatter count in full. They overlap with the writes of other slots, but on
        one host all three share the memory's bandwidth, so the sum does not flatter staging.
        """
        copies_s = 2 * num_bytes / self.copy_bytes_per_s
        slots = self.num_slots(num_bytes)
        slots_s = slots * (self.slot_s + self.write_s) + self.pieces_s(slots, num_bytes)
        return slots_s + copies_s + self.wire_s(num_bytes)

    def pieces_s(self, num_pieces: int, num_bytes: int) -> float:
        """Return what so many pieces cost beside their bytes, which lie between small and large."""
        if self.run_s is None or not num_pieces:
            return num_pieces * self.descriptor_s
        mean = min(max(num_bytes / num_pieces, SMALL_PIECE_BYTES), LARGE_PIECE_BYTES)
        share = math.log(mean / SMALL_PIECE_BYTES) / math.log(LARGE_PIECE_BYTES / SMALL_PIECE_BYTES)
        return num_pieces * (self.descriptor_s + share * (self.run_s - self.descriptor_s))


# ---------------------------------------------------------------- presets


def _preset(
    device: Device,
    *,
    descriptor_s: float,
    bytes_per_s: float,
    copy_bytes_per_s: float,
    maps_peer: bool = False,
) -> LinkCost:
    slots = slots_on(device)
    return LinkCost(
        descriptor_s=descriptor_s,
        bytes_per_s=bytes_per_s,
        copy_bytes_per_s=copy_bytes_per_s,
        slot_bytes=slots.slot_bytes(),
        slot_s=slots.slot_s,
        maps_peer=maps_peer,
    )


_GPU = Device("cuda")
# Used by ``kvferry plan --cost-model``, and by endpoints until they have measured a link.
#   nixl-host    measured: NIXL 1.5.1, UCX with CMA, host memory, loopback, 2 cores
#   nixl-gpu     measured: the same over cuda_ipc between two processes on one H200
#   mooncake     measured: Mooncake 0.3.13, TCP on loopback, 2 cores
#   shm          the target's pool mapped by the source, one memcpy per piece
#   cuda         measured: the same between processes on one H200, all pieces in one launch
#   rdma-400g    assumed, not measured: a 400 Gb/s NIC per rank, GPU memory at both ends
PRESETS = {
    "nixl-host": _preset(HOST, descriptor_s=3e-6, bytes_per_s=6.5e9, copy_bytes_per_s=7e9),
    "nixl-gpu": _preset(_GPU, descriptor_s=7.6e-6, bytes_per_s=1.19e12, copy_bytes_per_s=1.78e12),
    "mooncake": _preset(HOST, descriptor_s=50e-6, bytes_per_s=1e9, copy_bytes_per_s=7e9),
    "shm": _preset(HOST, descriptor_s=60e-9, bytes_per_s=7e9, copy_bytes_per_s=7e9, maps_peer=True),
    "cuda": _preset(
        _GPU, descriptor_s=0, bytes_per_s=1.8e12, copy_bytes_per_s=1.8e12, maps_peer=True
    ),
    "rdma-400g": _preset(_GPU, descriptor_s=1e-6, bytes_per_s=46e9, copy_bytes_per_s=1.78e12),
}
# A descriptor of nixl-host in bytes at its speed, rounded down to a power of two: NIXL's writes
# are cut into batches by it.
NIXL_DESCRIPTOR_BYTES = 16 << 10


def preset_for(transport: str, device: Device) -> str:
    """Return the name of the preset that a transport on a device starts with."""
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
    """Return the constants that an endpoint chooses by until it has measured a link.

    An endpoint passes what it knows of itself: the size of its slots, the measured speed of its
    copies, whether its transport maps the peer. The preset stands for the rest.
    """
    preset, slots = PRESETS[preset_for(transport, device)], slots_on(device)
    return replace(
        preset,
        # A preset may be that of another device: mooncake has one for both.
        slot_bytes=slots.slot_bytes() if slot_bytes is None else slot_bytes,
        slot_s=slots.slot_s,
        copy_bytes_per_s=preset.copy_bytes_per_s if copy_bytes_per_s is None else copy_bytes_per_s,
        maps_peer=preset.maps_peer if maps_peer is None else maps_peer,
    )


# ---------------------------------------------------------------- pushes

# A push of a few layers, beside what its write takes: time on the engine's thread, and time
# until an empty write has arrived and is acknowledged. Estimates for 2 cores; a fast host has less.
PUSH_CALL_S = 60e-6
PUSH_WRITE_S = 300e-6


# ---------------------------------------------------------------- measured links

# A link is measured when a peer connects, but for peers of one host no more often than this.
REMEASURE_S = 30.0
# LinkCost of so many hosts are kept although no peer there is connected.
MAX_PLACES = 256


class _Place(NamedTuple):
    """Links of one transport to one host, which cost the same."""

    transport: str
    host: str


class LinkCostTable:
    """The constants of each link of one source, first assumed and then measured.

    Two links of one transport may cost quite different things, such as NIXL to a neighbour and
    over a network, so they are measured for each host that peers are on.
    """

    def __init__(self, first: Mapping[str, LinkCost]) -> None:
        self._first = dict(first)
        self._measured: dict[_Place, LinkCost] = {}
        self._begun_at: dict[_Place, float] = {}
        self._places: dict[Session, _Place] = {}
        # Of the link that was measured last, or of the best transport.
        self.latest = next(iter(self._first.values()))

    def reached(self, session: Session, transport: str, host: str) -> None:
        """A link has its transport, to a peer on that host."""
        self._places[session] = _Place(transport, host)

    def of(self, session: Session) -> LinkCost:
        """Return the costs of a link; those of the best transport before it is reached."""
        place = self._places.get(session)
        if place is None:
            return next(iter(self._first.values()))
        return self._measured.get(place, self._first[place.transport])

    def due(self, session: Session, now: float) -> bool:
        """Whether it is time to measure a link; if so, that begins now."""
        place = self._places[session]
        if now < self._begun_at.get(place, -math.inf) + REMEASURE_S:
            return False
        self._begun_at[place] = now
        return True

    def measured(self, session: Session, link_cost: LinkCost) -> None:
        """A link costs this, and so do others like it."""
        place = self._places.get(session)
        if place is not None:
            self._measured[place] = self.latest = link_cost

    def forget(self, session: Session) -> None:
        """A link is over. What it cost is kept while others are like it."""
        place = self._places.pop(session, None)
        if place is not None and len(self._begun_at) > MAX_PLACES:
            kept = set(self._places.values())
            self._measured = {p: c for p, c in self._measured.items() if p in kept}
            self._begun_at = {p: t for p, t in self._begun_at.items() if p in kept}
