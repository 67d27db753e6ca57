"""What a link costs: a few writes into a peer's scratch memory, timed.

Pure but for the numbers it is told. The transport_thread makes the writes one after another
while a link is young; the chooser gets what comes out of it.

Two sizes in one piece tell what a write costs at all and what its bytes do: over a GPU's links
1 MiB takes hardly longer than 1 KiB, so that a single size would say that the link is slow.
Pieces of two sizes tell what a descriptor costs, for slices and for the runs of whole pages.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.cost import LARGE_PIECE_BYTES, SMALL_PIECE_BYTES, LinkCost
from kvferry.plan.places import Base
from kvferry.regions import Device

SCRATCH_BYTES = 1 << 20
# What a GPU moves in a time that can be told from that of a smaller write.
GPU_SCRATCH_BYTES = 4 << 20
LITTLE_BYTES = 128 << 10
PIECE_BYTES = SMALL_PIECE_BYTES
NUM_PIECES, NUM_RUNS = 64, 8
# Connecting, then each in turn: the best of each counts, because a busy machine only delays.
STEPS = ("first", *("bulk", "little", "pieces", "runs") * 4)
# By how much bytes may be faster than a whole bulk write, and runs cheaper than small pieces:
# differences of two times are as wrong as both times together.
MOST_FASTER, MOST_CHEAPER = 16, 8


def scratch_bytes(device: Device) -> int:
    """How much memory beside the slots is written to measure."""
    return SCRATCH_BYTES if device.is_host else GPU_SCRATCH_BYTES


class Calibration:
    """The writes that are still to be made, and how long the others took."""

    def __init__(self, ours: Base, theirs: Base, num_bytes: int = SCRATCH_BYTES) -> None:
        self._ours = ours
        self._theirs = theirs
        self._num_bytes = num_bytes
        self._seconds: dict[str, list[float]] = {step: [] for step in STEPS}
        self._left = list(STEPS)

    def next(self) -> Binding | None:
        """The next write, or None when all were made."""
        if not self._left:
            return None
        match self._left[0]:
            case "pieces":
                return scattered(self._ours, self._theirs, NUM_PIECES)
            case "runs":
                return scattered(self._ours, self._theirs, NUM_RUNS, LARGE_PIECE_BYTES)
            case "little":
                return Binding.bulk(self._ours, self._theirs, LITTLE_BYTES)
            case _:
                return Binding.bulk(self._ours, self._theirs, self._num_bytes)

    def took(self, seconds: float) -> None:
        """The write that ``next`` gave has ended well."""
        self._seconds[self._left.pop(0)].append(seconds)

    def link_cost(self, before: LinkCost) -> LinkCost:
        """What the link costs. What was not measured stays as it was."""
        bulk_s, little_s = min(self._seconds["bulk"]), min(self._seconds["little"])
        bytes_per_s = _speed(self._num_bytes, bulk_s, little_s)
        write_s = max(little_s - LITTLE_BYTES / bytes_per_s, 0.0)
        pieces_s, runs_s = min(self._seconds["pieces"]), min(self._seconds["runs"])
        rest_s = pieces_s - write_s - NUM_PIECES * PIECE_BYTES / bytes_per_s
        # If every bulk write was delayed, nothing would be left for the descriptors, and slices
        # would seem to cost nothing.
        descriptor_s = max(rest_s, pieces_s / 4, 1e-9) / NUM_PIECES
        run_s = (runs_s - write_s - NUM_RUNS * LARGE_PIECE_BYTES / bytes_per_s) / NUM_RUNS
        return replace(
            before,
            descriptor_s=descriptor_s,
            bytes_per_s=bytes_per_s,
            write_s=write_s,
            run_s=min(max(run_s, descriptor_s / MOST_CHEAPER), descriptor_s),
        )


def _speed(num_bytes: int, bulk_s: float, little_s: float) -> float:
    """Bytes a second behind what any write costs; at least what the whole write did."""
    least = num_bytes / bulk_s
    if bulk_s <= little_s:
        return least
    return min(max((num_bytes - LITTLE_BYTES) / (bulk_s - little_s), least), MOST_FASTER * least)


def scattered(
    source: Base, target: Base, num_pieces: int, piece_bytes: int = PIECE_BYTES
) -> Binding:
    """Every second stretch of either side, so that nothing can be merged."""
    offsets = np.arange(num_pieces, dtype=np.int64) * 2 * piece_bytes
    one = np.ones(num_pieces, dtype=np.int64)
    flat = Stride(piece_bytes, piece_bytes)
    pieces = Pieces(offsets, offsets, one * piece_bytes, one, one, flat, flat, whole_pages=True)
    return Binding((BindingPart("", "", (source,), (target,), pieces),))
