"""The chooser: which path carries a parcel, from predicted times.

A pure function of the parcel's shape and the transport's measured constants.
Callers may override it; it never guesses what it was not given.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvferry.errors import InputError
from kvferry.plan.bind import Binding

# Pieces of these sizes are measured: those of a slice, and those of a page's run.
SMALL_PIECE_BYTES, LARGE_PIECE_BYTES = 1 << 10, 64 << 10


class Path(StrEnum):
    """How a parcel's bytes get across."""

    RUNS = "runs"
    SLICES = "slices"
    STAGED = "staged"


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport costs on this machine.

    ``write_s`` is what a write costs however large it is. ``descriptor_s`` is for pieces of
    1 KiB and less, ``run_s`` for those of 64 KiB and more, where that differs.
    ``maps_peer``: the source writes straight into the target's mapped memory, so there is
    nothing to stage.
    """

    descriptor_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    slot_bytes: int = 4 << 20
    slot_s: float = 100e-6
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

    def pieces_s(self, num_pieces: int, num_bytes: int) -> float:
        """What so many pieces cost beside their bytes, which lie between small and large."""
        if self.run_s is None or not num_pieces:
            return num_pieces * self.descriptor_s
        mean = min(max(num_bytes / num_pieces, SMALL_PIECE_BYTES), LARGE_PIECE_BYTES)
        share = math.log(mean / SMALL_PIECE_BYTES) / math.log(LARGE_PIECE_BYTES / SMALL_PIECE_BYTES)
        return num_pieces * (self.descriptor_s + share * (self.run_s - self.descriptor_s))


class Shape(NamedTuple):
    """What the chooser needs to know of a parcel.

    ``runs`` counts the pieces after merging; that path is open where a full page
    is one piece on both sides (``contiguous``).
    """

    num_bytes: int
    slices: int
    runs: int
    contiguous: bool


class Choice(NamedTuple):
    """The chosen path, and the predicted seconds of every path that is open."""

    path: Path
    seconds: dict[Path, float]

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the chosen path."""
        return self.seconds[self.path]


def shape_of(binding: Binding) -> Shape:
    """The shape of a bound parcel."""
    runs = binding.merged().num_pieces
    return Shape(*binding.size, runs, binding.contiguous)


def num_slots(num_bytes: int, constants: Constants) -> int:
    """How many staging slots a parcel fills, and so how many bulk writes it takes."""
    return -(-num_bytes // constants.slot_bytes)


def choose(shape: Shape, constants: Constants, override: Path | None = None) -> Choice:
    """The fastest open path by prediction, or ``override`` if it is open.

    Ties go to the simpler path: runs before slices before staged.
    """
    seconds = _predict(shape, constants)
    if override is not None:
        if override not in seconds:
            open_paths = ", ".join(seconds)
            raise InputError(f"the path {override} is not open here; choose among {open_paths}")
        return Choice(override, seconds)
    return Choice(min(seconds, key=lambda path: seconds[path]), seconds)


def _predict(shape: Shape, constants: Constants) -> dict[Path, float]:
    num_bytes = shape.num_bytes
    wire_s = num_bytes / constants.bytes_per_s
    seconds: dict[Path, float] = {}
    if shape.contiguous:
        seconds[Path.RUNS] = constants.write_s + constants.pieces_s(shape.runs, num_bytes) + wire_s
    seconds[Path.SLICES] = constants.write_s + constants.pieces_s(shape.slices, num_bytes) + wire_s
    if not constants.maps_peer:
        # Gather and scatter are counted in full. They overlap with the write of other
        # slots, but on one host all three share the memory's bandwidth, so the sum is
        # the bound that does not flatter staging.
        copies_s = 2 * num_bytes / constants.copy_bytes_per_s
        slots = num_slots(num_bytes, constants)
        slots_s = slots * (constants.slot_s + constants.write_s)
        slots_s += constants.pieces_s(slots, num_bytes)
        seconds[Path.STAGED] = slots_s + copies_s + wire_s
    return seconds


# Starting points for planning without a machine at hand. An endpoint measures its own.
#   nixl-host    measured: NIXL 1.5.1, UCX with CMA, host memory, loopback, 2 cores
#   nixl-gpu     measured: the same over cuda_ipc between two processes on one H200
#   mooncake     measured: Mooncake 0.3.13, TCP on loopback, 2 cores
#   shm          the target's pool mapped by the source, one memcpy per piece
#   cuda         measured: the same between processes on one H200, all pieces in one launch
#   rdma-400g    assumed, not measured: a 400 Gb/s NIC per rank, GPU memory at both ends
PRESETS = {
    "nixl-host": Constants(descriptor_s=3e-6, bytes_per_s=6.5e9, copy_bytes_per_s=7e9),
    "nixl-gpu": Constants(descriptor_s=7.6e-6, bytes_per_s=1.19e12, copy_bytes_per_s=1.78e12),
    "mooncake": Constants(descriptor_s=50e-6, bytes_per_s=1e9, copy_bytes_per_s=7e9),
    "shm": Constants(descriptor_s=60e-9, bytes_per_s=7e9, copy_bytes_per_s=7e9, maps_peer=True),
    "cuda": Constants(descriptor_s=0, bytes_per_s=1.8e12, copy_bytes_per_s=1.8e12, maps_peer=True),
    "rdma-400g": Constants(descriptor_s=1e-6, bytes_per_s=46e9, copy_bytes_per_s=1.78e12),
}
