"""The shortest way for a binding of one piece, which is what every staged write is.

Arrays are the right means for thousands of pieces, but cost more than the copy of a
slot when there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.plan.bind import Binding


class Single(NamedTuple):
    """One piece: where it is read, where it is written."""

    source_region: int
    source_offset: int
    target_region: int
    target_offset: int
    length: int

    def fits(self, source_sizes: Sequence[int], target_sizes: Sequence[int]) -> bool:
        """Whether it lies inside a region of either side."""
        return (
            self.length >= 0
            and 0 <= self.source_region < len(source_sizes)
            and 0 <= self.source_offset <= source_sizes[self.source_region] - self.length
            and 0 <= self.target_region < len(target_sizes)
            and 0 <= self.target_offset <= target_sizes[self.target_region] - self.length
        )


def single(binding: Binding) -> Single | None:
    """The only piece of a binding; None if it has none, or more."""
    if len(binding.parts) != 1:
        return None
    part = binding.parts[0]
    pieces = part.pieces
    if len(part.source_bases) != 1 or len(pieces.lengths) != 1 or pieces.num_pieces != 1:
        return None
    ours, theirs = part.source_bases[0], part.target_bases[0]
    return Single(
        ours.region,
        ours.offset + int(pieces.source[0]),
        theirs.region,
        theirs.offset + int(pieces.target[0]),
        int(pieces.lengths[0]),
    )
