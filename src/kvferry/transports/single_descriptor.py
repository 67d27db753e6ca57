"""Fast path for a binding of a single piece, which every staged write is.

Arrays suit bindings of thousands of pieces. For one piece they cost more than copying a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.plan.bind import Binding


class SingleDescriptor(NamedTuple):
    """One contiguous piece: where it is read and where it is written."""

    source_region: int
    source_offset: int
    target_region: int
    target_offset: int
    length: int

    def fits(self, source_sizes: Sequence[int], target_sizes: Sequence[int]) -> bool:
        """Return whether the piece lies inside a region of either side."""
        return (
            self.length >= 0
            and 0 <= self.source_region < len(source_sizes)
            and 0 <= self.source_offset <= source_sizes[self.source_region] - self.length
            and 0 <= self.target_region < len(target_sizes)
            and 0 <= self.target_offset <= target_sizes[self.target_region] - self.length
        )


def single_descriptor(binding: Binding) -> SingleDescriptor | None:
    """Return the only piece of a binding; None if it has none or several."""
    if len(binding.parts) != 1:
        return None
    part = binding.parts[0]
    pieces = part.pieces
    if len(part.source_bases) != 1 or len(pieces.lengths) != 1 or pieces.num_pieces != 1:
        return None
    ours, theirs = part.source_bases[0], part.target_bases[0]
    return SingleDescriptor(
        ours.region,
        ours.offset + int(pieces.source[0]),
        theirs.region,
        theirs.offset + int(pieces.target[0]),
        int(pieces.lengths[0]),
    )
