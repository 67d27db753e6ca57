"""Tests that bases of layers are cached, and never confused between placements."""

from __future__ import annotations

import pytest

from kvferry.errors import InputError
from kvferry.plan.places import MAX_CACHED_BASES, Base, Placement


def placement(offset: int, layers: range = range(4)) -> Placement:
    bases = tuple(Base(layer, 0, offset + layer) for layer in layers)
    return Placement("kv", "k", 16, 4, 4, 2, bases)


def test_same_layers_give_the_same_tuple() -> None:
    """Other caches compare the tuples by identity."""
    one = placement(100)
    assert one.bases_of((1, 2)) is one.bases_of((1, 2))
    assert [base.offset for base in one.bases_of((3, 1))] == [103, 101]


def test_reused_identity_gives_no_stale_bases() -> None:
    """A new tuple may have the identity of one that was freed."""
    for offset in range(2 * MAX_CACHED_BASES):
        assert placement(offset).bases_of((0, 2)) == (Base(0, 0, offset), Base(2, 0, offset + 2))


def test_missing_layers_are_refused_every_time() -> None:
    one = placement(0, range(2, 4))
    for _ in range(2):
        with pytest.raises(InputError, match="no memory for layer 0 and 1 more"):
            one.bases_of((0, 1, 2))
