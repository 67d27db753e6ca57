"""Costs of links: the defaults, and their measurement with a few timed writes.

The transport thread makes these writes, into the peer's scratch memory, one after another when a
link is new. Two sizes in one piece separate the fixed cost of a write from the cost of its bytes:
over a GPU's links 1 MiB takes hardly longer than 1 KiB, so a single size would make the link look
slow. Two numbers of small pieces separate the fixed cost of listing descriptors from that of each.
Large pieces give the cost of a descriptor for runs of whole pages.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache

import numpy as np
from msgspec.structs import replace

from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.setup import SCRATCH_BYTES, EndpointSetup
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.staging import allocate
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.cost import LARGE_PIECE_BYTES, SMALL_PIECE_BYTES, LinkCost, default_link_cost
from kvferry.plan.places import Base
from kvferry.transports.base import Transport

LITTLE_BYTES = 128 << 10
PIECE_BYTES = SMALL_PIECE_BYTES
FEW_PIECES, NUM_PIECES = 64, 256
# Large pieces overlap, because scratch memory does not hold as many as it takes to measure one.
_RUN_STRIDE = (SCRATCH_BYTES - LARGE_PIECE_BYTES) // FEW_PIECES
# The first write pays for connecting. Of each kind the best time counts, because other load on
# the machine only adds time.
STEPS = ("first", *("bulk", "little", "few", "pieces", "runs") * 4)
# Larger than most caches: pages have left the cache when they are sent.
_COPIED_BYTES = 32 << 20
# How much larger a large piece is than a small one.
_MORE_BYTES = LARGE_PIECE_BYTES - PIECE_BYTES
# The bandwidth is a difference of two noisy times. Limit it to this multiple of the bandwidth of
# a whole bulk write, and the cost of a run to this fraction of that of a small piece.
MAX_SPEEDUP, MAX_DISCOUNT = 16, 8


def default_link_costs(config: EndpointConfig, setup: EndpointSetup) -> dict[str, LinkCost]:
    """Return the cost of each transport: the configured one, or else the default."""
    device, slots = setup.memory.device, setup.slots

    def cost_of(transport: Transport) -> LinkCost:
        if config.link_cost is not None:
            return replace(config.link_cost, maps_peer=transport.maps_peer)
        return default_link_cost(
            transport.name,
            device,
            slot_bytes=slots.pool.slot_bytes if slots else None,
            copy_bytes_per_s=copy_speed() if device.is_host and not transport.maps_peer else None,
            maps_peer=transport.maps_peer,
        )

    return {transport.name: cost_of(transport) for transport in setup.transports}


@cache
def copy_speed() -> float:
    """Return the CPU's bytes per second when gathering small pieces, measured once a process."""
    source, target = allocate(_COPIED_BYTES), allocate(_COPIED_BYTES)
    # Memory that was never written is one page of zeros, which stays in the cache.
    ctypes.memset(source.region.address, 1, _COPIED_BYTES)
    pieces = scattered(Base(0, 0, 0), Base(0, 0, 0), _COPIED_BYTES // (2 * PIECE_BYTES))
    addresses = (source.region.address,), (target.region.address,)
    copy_binding(pieces, *addresses)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        copy_binding(pieces, *addresses)
        seconds.append(time.perf_counter() - begin)
    return pieces.num_bytes / min(seconds)


class Calibration:
    """Sequence of writes that measures one link, with their durations."""

    def __init__(self, local: Base, remote: Base, num_bytes: int = SCRATCH_BYTES) -> None:
        bulk = Binding.bulk(local, remote, num_bytes)
        self._num_bytes = num_bytes
        self._writes = {
            "first": bulk,
            "bulk": bulk,
            "little": Binding.bulk(local, remote, LITTLE_BYTES),
            "few": scattered(local, remote, FEW_PIECES),
            "pieces": scattered(local, remote, NUM_PIECES),
            "runs": scattered(local, remote, FEW_PIECES, LARGE_PIECE_BYTES, _RUN_STRIDE),
        }
        self._seconds: dict[str, list[float]] = {step: [] for step in STEPS}
        self._remaining = list(STEPS)

    def next(self) -> Binding | None:
        """Return the next write, or None after the last one."""
        return self._writes[self._remaining[0]] if self._remaining else None

    def record(self, seconds: float) -> None:
        """Store the duration of the write that ``next`` returned, and advance."""
        self._seconds[self._remaining.pop(0)].append(seconds)

    def link_cost(self, before: LinkCost) -> LinkCost:
        """Return ``before`` with the measured fields replaced."""
        bulk_s, little_s, few_s, pieces_s, runs_s = (min(self._seconds[k]) for k in STEPS[1:6])
        bytes_per_s = _bandwidth(self._num_bytes, bulk_s, little_s)
        write_s = max(little_s - LITTLE_BYTES / bytes_per_s, 0.0)
        each_s = (pieces_s - few_s) / (NUM_PIECES - FEW_PIECES) - PIECE_BYTES / bytes_per_s
        # If the few were delayed, the difference may be too small; without a lower bound
        # descriptors would then seem to cost nothing.
        descriptor_s = max(each_s, pieces_s / 4 / NUM_PIECES, 1e-12)
        run_s = (runs_s - few_s) / FEW_PIECES + descriptor_s - _MORE_BYTES / bytes_per_s
        return replace(
            before,
            descriptor_s=descriptor_s,
            bytes_per_s=bytes_per_s,
            write_s=write_s,
            run_s=min(max(run_s, descriptor_s / MAX_DISCOUNT), descriptor_s),
        )


def _bandwidth(num_bytes: int, bulk_s: float, little_s: float) -> float:
    """Bytes per second without the fixed cost; at least the bandwidth of the whole bulk write."""
    minimum = num_bytes / bulk_s
    if bulk_s <= little_s:
        return minimum
    marginal = (num_bytes - LITTLE_BYTES) / (bulk_s - little_s)
    return min(max(marginal, minimum), MAX_SPEEDUP * minimum)


def scattered(
    source: Base,
    target: Base,
    num_pieces: int,
    piece_bytes: int = PIECE_BYTES,
    stride: int | None = None,
) -> Binding:
    """Return a write of equal pieces that cannot be merged: by default with gaps of their size."""
    offsets = np.arange(num_pieces, dtype=np.int64) * (stride or 2 * piece_bytes)
    one = np.ones(num_pieces, dtype=np.int64)
    flat = Stride(piece_bytes, piece_bytes)
    pieces = Pieces(offsets, offsets, one * piece_bytes, one, one, flat, flat, whole_pages=True)
    return Binding((BindingPart("", "", (source,), (target,), pieces),))
