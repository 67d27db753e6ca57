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


class Path(StrEnum):
    """How a parcel's bytes get across."""

    RUNS = "runs"
    SLICES = "slices"
    STAGED = "staged"


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport costs on this machine.

    ``maps_peer``: the source writes straight into the target's mapped memory,
    so there is nothing to stage.
    """

    descriptor_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    slot_bytes: int = 4 << 20
    slot_s: float = 100e-6
    maps_peer: bool = False

    def __post_init__(self) -> None:
        speeds = (self.bytes_per_s, self.copy_bytes_per_s, self.slot_bytes)
        if not all(0 < speed < math.inf for speed in speeds):
            raise InputError("bandwidth, copy speed and slot size must be above 0 and finite")
        if not all(0 <= cost < math.inf for cost in (self.descriptor_s, self.slot_s)):
            raise InputError("the cost of a descriptor and of a slot is 0 or more, and finite")


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
    return Shape(binding.num_bytes, binding.num_pieces, runs, binding.contiguous)


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
    wire_s = shape.num_bytes / constants.bytes_per_s
    seconds: dict[Path, float] = {}
    if shape.contiguous:
        seconds[Path.RUNS] = shape.runs * constants.descriptor_s + wire_s
    seconds[Path.SLICES] = shape.slices * constants.descriptor_s + wire_s
    if not constants.maps_peer:
        # Gather and scatter are counted in full. They overlap with the write of other
        # slots, but on one host all three share the memory's bandwidth, so the sum is
        # the bound that does not flatter staging.
        copies_s = 2 * shape.num_bytes / constants.copy_bytes_per_s
        slots = num_slots(shape.num_bytes, constants)
        seconds[Path.STAGED] = slots * (constants.slot_s + constants.descriptor_s) + copies_s
        seconds[Path.STAGED] += wire_s
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
