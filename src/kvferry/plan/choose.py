"""The chooser: which mode carries a parcel, from predicted times.

A pure function of the parcel's shape and the transport's measured constants.
Callers may override it; it never guesses what it was not given.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.plan.bind import Binding
from kvferry.plan.cost import LinkCost


class TransferMode(StrEnum):
    """How a parcel's bytes get across."""

    RUNS = "runs"
    SLICES = "slices"
    STAGED = "staged"


class BlockShape(NamedTuple):
    """What the chooser needs to know of a parcel.

    ``runs`` counts the pieces after merging; that mode is open where a full page
    is one piece on both sides (``contiguous``).
    """

    num_bytes: int
    slices: int
    runs: int
    contiguous: bool


class Choice(NamedTuple):
    """The chosen mode, and the predicted seconds of every mode that is open."""

    mode: TransferMode
    seconds: dict[TransferMode, float]

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the chosen mode."""
        return self.seconds[self.mode]


def shape_of(binding: Binding) -> BlockShape:
    """The shape of a bound parcel."""
    runs = binding.merged().num_pieces
    return BlockShape(*binding.size, runs, binding.contiguous)


def choose(shape: BlockShape, link_cost: LinkCost, override: TransferMode | None = None) -> Choice:
    """The fastest open mode by prediction, or ``override`` if it is open.

    Ties go to the simpler mode: runs before slices before staged.
    """
    seconds = _predict(shape, link_cost)
    if override is not None:
        if override not in seconds:
            open_modes = ", ".join(seconds)
            raise InputError(f"the mode {override} is not open here; choose among {open_modes}")
        return Choice(override, seconds)
    return Choice(min(seconds, key=lambda mode: seconds[mode]), seconds)


def _predict(shape: BlockShape, link_cost: LinkCost) -> dict[TransferMode, float]:
    num_bytes = shape.num_bytes
    seconds: dict[TransferMode, float] = {}
    if shape.contiguous:
        seconds[TransferMode.RUNS] = link_cost.direct_s(shape.runs, num_bytes)
    seconds[TransferMode.SLICES] = link_cost.direct_s(shape.slices, num_bytes)
    if not link_cost.maps_peer:
        seconds[TransferMode.STAGED] = link_cost.staged_s(num_bytes)
    return seconds
