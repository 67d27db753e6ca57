"""Faults in bindings: each changes bytes that arrive, and nothing else that a target can see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from moving import filled, make_ranks, random_cache

from kvferry.layout import DType, Layout, Paged, Parallel, StateRow
from kvferry.layout.spec import CacheSpec, Group, Tensor, attention_group
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import Binding, RankPair, Request, bind, reshard
from kvferry.plan.places import Base
from kvferry.regions import HOST, Region
from kvferry.testing.faulty_transport import (
    drop_groups,
    drop_page,
    flip_byte,
    shorten,
    swap_layers,
    swap_tensors,
)

CACHE = CacheSpec(
    3,
    (
        attention_group("kv", Paged(), (0, 1), 2, 8, None, DType.BFLOAT16),
        Group("state", StateRow(), (2,), 2, (Tensor("s", DType.FLOAT32, 5),)),
    ),
)
REQUEST = Request(40)
Damage = Callable[[Binding, list[Region]], Binding | None]
DAMAGES: dict[str, tuple[Damage, int]] = {
    # With the bytes that differ afterwards: at most, and at least one.
    "flip-byte": (flip_byte, 1),
    "drop-state": (lambda pieces, _: drop_groups(pieces, {"state"}), 40),
    "swap-layers": (lambda pieces, _: swap_layers(pieces), 2 * 40 * 32),
    "swap-kv": (lambda pieces, _: swap_tensors(pieces), 4 * 40 * 32),
    "stale-page": (lambda pieces, _: drop_page(pieces), 2 * 16 * 32),
    "short-write": (lambda pieces, _: shorten(pieces), 8),
}


class Transfer:
    """A binding between one source and one target, and the memory of both."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        layout = Layout(CACHE, Parallel(), page_tokens=16)
        cache = random_cache(CACHE, REQUEST.num_tokens, rng)
        (self.source,) = filled(layout, cache, REQUEST, rng)
        (self.target,) = make_ranks(layout, REQUEST.num_tokens, rng)
        ends = self.source.side, self.target.side
        self.binding = bind(reshard(layout, layout), RankPair(0, 0), REQUEST, *ends)
        self.regions = [
            Region(region.ctypes.data, region.nbytes, HOST) for region in self.source.regions
        ]

    def result(self, binding: Binding) -> np.ndarray:
        targets = [region.copy() for region in self.target.regions]
        copy_pieces(binding.descriptors(), self.source.regions, targets)
        return np.concatenate(targets)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_fault_changes_what_arrives(name: str) -> None:
    damage, most = DAMAGES[name]
    transfer = Transfer()
    damaged = damage(transfer.binding, transfer.regions)
    assert damaged is not None
    differing = int((transfer.result(transfer.binding) != transfer.result(damaged)).sum())
    assert 0 < differing <= most


@pytest.mark.parametrize("name", ["flip-byte", "stale-page", "short-write"])
def test_a_staged_write_is_damaged_too(name: str) -> None:
    damage, _ = DAMAGES[name]
    slot = np.arange(256, dtype=np.uint8)
    bulk = Binding.bulk(Base(0, 0, 64), Base(0, 0, 0), 128)
    damaged = damage(bulk, [Region(slot.ctypes.data, slot.nbytes, HOST)])
    assert damaged is not None
    target = np.zeros(256, dtype=np.uint8)
    copy_pieces(damaged.descriptors(), [slot], [target])
    assert 0 < int((target[:128] != slot[64:192]).sum()) <= 64
    assert not target[128:].any()


@pytest.mark.parametrize("name", ["drop-state", "swap-layers", "swap-kv"])
def test_what_is_impossible_changes_nothing(name: str) -> None:
    damage, _ = DAMAGES[name]
    assert damage(Binding.bulk(Base(0, 0, 0), Base(0, 0, 0), 128), []) is None
