"""The chooser: which path carries a parcel, from predicted times.

A pure function of the parcel's shape and the transport's measured constants.
Callers may override it; it never guesses what it was not given.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvferry.errors import InputError
from kvferry.plan.bind import Binding
from kvferry.plan.cost import Constants


class Path(StrEnum):
    """How a parcel's bytes get across."""

    RUNS = "runs"
    SLICES = "slices"
    STAGED = "staged"


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
    seconds: dict[Path, float] = {}
    if shape.contiguous:
        seconds[Path.RUNS] = constants.direct_s(shape.runs, num_bytes)
    seconds[Path.SLICES] = constants.direct_s(shape.slices, num_bytes)
    if not constants.maps_peer:
        seconds[Path.STAGED] = constants.staged_s(num_bytes)
    return seconds
