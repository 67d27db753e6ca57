"""What a transport costs: a few writes into a peer's scratch memory, timed.

Pure but for the numbers it is told. The mover makes the writes one after another
while a link is young; the chooser gets what comes out of it.
"""

from __future__ import annotations

import numpy as np

from kvferry.plan.bind import Binding, Part
from kvferry.plan.choose import Constants
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base

SCRATCH_BYTES = 1 << 20
PIECE_BYTES = 1024
NUM_PIECES = 64
# Connecting, then both in turn: the best of each counts, because a busy machine only delays.
STEPS = ("first", *("bulk", "pieces") * 4)


class Calibration:
    """The writes that are still to be made, and how long the others took."""

    def __init__(self, ours: Base, theirs: Base) -> None:
        self._ours = ours
        self._theirs = theirs
        self._seconds: dict[str, list[float]] = {step: [] for step in STEPS}
        self._left = list(STEPS)

    def next(self) -> Binding | None:
        """The next write, or None when all were made."""
        if not self._left:
            return None
        if self._left[0] == "pieces":
            return scattered(self._ours, self._theirs, NUM_PIECES)
        return Binding.bulk(self._ours, self._theirs, SCRATCH_BYTES)

    def took(self, seconds: float) -> None:
        """The write that ``next`` gave has ended well."""
        self._seconds[self._left.pop(0)].append(seconds)

    def constants(self, before: Constants) -> Constants:
        """What the transport costs. What was not measured stays as it was."""
        bulk_s, pieces_s = min(self._seconds["bulk"]), min(self._seconds["pieces"])
        bytes_per_s = SCRATCH_BYTES / bulk_s
        rest_s = pieces_s - NUM_PIECES * PIECE_BYTES / bytes_per_s
        # If every bulk write was delayed, nothing would be left for the descriptors, and slices
        # would seem to cost nothing.
        rest_s = max(rest_s, pieces_s / 4)
        return Constants(
            descriptor_s=max(rest_s / NUM_PIECES, 1e-9),
            bytes_per_s=bytes_per_s,
            copy_bytes_per_s=before.copy_bytes_per_s,
            slot_bytes=before.slot_bytes,
            slot_s=before.slot_s,
            maps_peer=before.maps_peer,
        )


def scattered(source: Base, target: Base, num_pieces: int) -> Binding:
    """Every second stretch of either side, so that nothing can be merged."""
    offsets = np.arange(num_pieces, dtype=np.int64) * 2 * PIECE_BYTES
    one = np.ones(num_pieces, dtype=np.int64)
    flat = Stride(PIECE_BYTES, PIECE_BYTES)
    pieces = Pieces(offsets, offsets, one * PIECE_BYTES, one, one, flat, flat, whole_pages=True)
    return Binding((Part("", "", (source,), (target,), pieces),))
