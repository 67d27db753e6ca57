"""Bases of layers: remembered, and never another placement's."""

from __future__ import annotations

import pytest

from kvferry.errors import InputError
from kvferry.plan.places import MAX_KNOWN_BASES, Base, Placement


def placement(offset: int, layers: range = range(4)) -> Placement:
    bases = tuple(Base(layer, 0, offset + layer) for layer in layers)
    return Placement("kv", "k", 16, 4, 4, 2, bases)


def test_the_same_layers_are_the_same_tuple() -> None:
    """By which whoever remembers something about them finds it quickly."""
    one = placement(100)
    assert one.bases_of((1, 2)) is one.bases_of((1, 2))
    assert [base.offset for base in one.bases_of((3, 1))] == [103, 101]


def test_placements_that_are_gone_are_not_taken_for_new_ones() -> None:
    """A new tuple of bases may lie where one lay that is no more."""
    for offset in range(2 * MAX_KNOWN_BASES):
        assert placement(offset).bases_of((0, 2)) == (Base(0, 0, offset), Base(2, 0, offset + 2))


def test_layers_that_are_not_there_are_refused_every_time() -> None:
    one = placement(0, range(2, 4))
    for _ in range(2):
        with pytest.raises(InputError, match="no memory for layer 0 and 1 more"):
            one.bases_of((0, 1, 2))
