"""The chooser: picks a transfer mode by predicted times.

``choose`` is a pure function of what a push consists of and of the link's cost. A caller may
override the mode.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.plan.bind import Binding
from kvferry.plan.cost import LinkCost


class TransferMode(StrEnum):
    """How the blocks of a push are transferred.

    ``RUNS`` sends a descriptor for each run of adjacent pages, ``SLICES`` one for each contiguous
    piece. ``STAGED`` gathers pieces into a staging slot and sends that in one write.
    """

    RUNS = "runs"
    SLICES = "slices"
    STAGED = "staged"


class BlockShape(NamedTuple):
    """The facts about the blocks of a push that the chooser needs.

    ``slices`` and ``runs`` count the pieces before and after merging adjacent pages. The mode
    ``runs`` is open if a full page is one piece on both sides (``contiguous``). If elements are
    translated, a piece is one element, and only copies are open: a descriptor for each would take
    more memory than the cache.
    """

    num_bytes: int
    slices: int
    runs: int
    contiguous: bool
    is_translated: bool = False


class Choice(NamedTuple):
    """The chosen mode, and the predicted seconds of each open mode."""

    mode: TransferMode
    seconds: dict[TransferMode, float]

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the chosen mode."""
        return self.seconds[self.mode]


def shape_of(binding: Binding) -> BlockShape:
    """Return the shape of a binding."""
    runs = binding.merged().num_pieces
    is_translated = any(part.pieces.is_translated for part in binding.parts)
    return BlockShape(*binding.size, runs, binding.contiguous, is_translated)


def choose(shape: BlockShape, link_cost: LinkCost, override: TransferMode | None = None) -> Choice:
    """Return the open mode with the least predicted time, or ``override`` if that is open.

    On a tie the simpler mode wins: runs before slices before staged.
    """
    seconds = _predict(shape, link_cost)
    if override is not None:
        if override not in seconds:
            open_modes = ", ".join(seconds)
            raise InputError(f"the mode {override} is not open here; use one of {open_modes}")
        return Choice(override, seconds)
    return Choice(min(seconds, key=lambda mode: seconds[mode]), seconds)


def _predict(shape: BlockShape, link_cost: LinkCost) -> dict[TransferMode, float]:
    num_bytes = shape.num_bytes
    seconds: dict[TransferMode, float] = {}
    if shape.contiguous and not shape.is_translated:
        seconds[TransferMode.RUNS] = link_cost.direct_s(shape.runs, num_bytes)
    if link_cost.maps_peer or not shape.is_translated:
        seconds[TransferMode.SLICES] = link_cost.direct_s(shape.slices, num_bytes)
    if not link_cost.maps_peer:
        seconds[TransferMode.STAGED] = link_cost.staged_s(num_bytes)
    return seconds
