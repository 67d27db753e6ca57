"""Where a rank keeps its bytes: strides and bases, without pointers.

A placement says, for one tensor of one group, how far apart pages, tokens and
units are and where each layer begins inside a registered region. That is enough
for NHD and HND, for one tensor per layer or one for all, for K and V apart or
packed. The map can be sent to a peer; addresses enter only at the transport.

Offsets are 64-bit. A placement that could produce one of ``MAX_OFFSET`` or more
is refused when it is made, so the arithmetic on it never wraps.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import InputError
from kvferry.layout.layout import MAX_PAGE_TOKENS, Layout, Order
from kvferry.layout.spec import MAX_UNITS, Group, StateRow, Tensor

Int64s = NDArray[np.int64]
MAX_OFFSET = 1 << 62
# How many answers of ``Placement.bases_of`` are remembered.
MAX_KNOWN_BASES = 1024


class Base(msgspec.Struct, frozen=True, array_like=True):
    """Where one layer of a tensor begins."""

    layer: int
    region: int
    offset: int


# By identity and layers; what is kept of the former keeps it from being used again.
_known_bases: dict[tuple[int, tuple[int, ...]], tuple[tuple[Base, ...], tuple[Base, ...]]] = {}


class Placement(msgspec.Struct, frozen=True):
    """Strides in bytes of one tensor, alike in every layer, and each layer's base.

    For a slot group a "page" is a state row and ``token_stride`` is unused.
    """

    group: str
    tensor: str
    page_stride: int
    token_stride: int
    unit_stride: int
    num_pages: int
    bases: tuple[Base, ...]

    def __post_init__(self) -> None:
        numbers = [self.page_stride, self.token_stride, self.unit_stride, self.num_pages]
        numbers += [number for base in self.bases for number in (base.region, base.offset)]
        if min(numbers) < 0:
            raise InputError(
                f"{self.group}.{self.tensor} has a negative stride, offset, region or number "
                f"of pages; give none below 0"
            )
        if max(*numbers, self._reach()) >= MAX_OFFSET:
            raise InputError(
                f"{self.group}.{self.tensor} could lie 2**62 bytes or more into its region; "
                f"use fewer or smaller pages"
            )

    def _reach(self) -> int:
        """A bound on every offset, whatever page, token and unit are asked for."""
        return (
            max((base.offset for base in self.bases), default=0)
            + self.num_pages * self.page_stride
            + MAX_PAGE_TOKENS * self.token_stride
            + MAX_UNITS * self.unit_stride
        )

    def bases_of(self, layers: tuple[int, ...]) -> tuple[Base, ...]:
        """The bases of those layers, in that order: the same tuple every time, while it is known.

        Every write asks for them, mostly for the same layers.
        """
        key = id(self.bases), layers
        known = _known_bases.get(key)
        # An identity may be another's by now.
        if known is None or known[0] is not self.bases:
            if len(_known_bases) >= MAX_KNOWN_BASES:
                _known_bases.clear()
            known = _known_bases[key] = self.bases, self._bases_of(layers)
        return known[1]

    def _bases_of(self, layers: tuple[int, ...]) -> tuple[Base, ...]:
        known = {base.layer: base for base in self.bases}
        missing = [layer for layer in layers if layer not in known]
        if missing:
            raise InputError(
                f"{self.group}.{self.tensor} has no memory for layer {missing[0]} and "
                f"{len(missing) - 1} more; register every layer that this rank holds"
            )
        return tuple(known[layer] for layer in layers)


class PoolMap(msgspec.Struct, frozen=True):
    """Every placement of one rank."""

    placements: tuple[Placement, ...]

    def of(self, group: str, tensor: str) -> Placement:
        """The placement of one tensor."""
        for placement in self.placements:
            if placement.group == group and placement.tensor == tensor:
                return placement
        raise InputError(f"{group}.{tensor} has no memory on this rank; register its pools")


class PageTable:
    """The pages of one request in one group, in token order.

    ``pages[i]`` holds the rank's local tokens from ``(first_page + i) *
    page_tokens`` on. A window group may leave out the pages it has dropped.
    For a slot group the only entry is the request's state row.
    """

    __slots__ = ("first_page", "pages")

    def __init__(self, pages: ArrayLike, first_page: int = 0) -> None:
        try:
            # A copy that stays as it is: bindings remember what they made of it.
            self.pages: Int64s = np.array(pages, dtype=np.int64)
        except (OverflowError, TypeError, ValueError):
            raise InputError("a page table is a flat list of 64-bit page numbers") from None
        self.pages.flags.writeable = False
        self.first_page = first_page
        if self.pages.ndim != 1 or not 0 <= first_page < MAX_OFFSET:
            raise InputError("a page table is a flat list of page numbers from page 0 or later on")

    @property
    def end_page(self) -> int:
        """One past the last page that the table has."""
        return self.first_page + len(self.pages)

    def __repr__(self) -> str:
        return f"<PageTable {len(self.pages)} pages from page {self.first_page}>"


class Pools(NamedTuple):
    """A pool map together with the size of every region that it names."""

    map: PoolMap
    region_bytes: tuple[int, ...]


def contiguous_pools(layout: Layout, rank: int, num_pages: int, num_rows: int = 1) -> Pools:
    """The plainest placement: a dense region for every layer of every tensor.

    ``num_rows`` is the number of state rows in slot groups.
    """
    placements: list[Placement] = []
    sizes: list[int] = []
    held = layout.rank_shards(rank)
    for group in (
        group for group in layout.spec.groups if any(h.group == group.name for h in held)
    ):
        mine = [shard for shard in held if shard.group == group.name]
        layers = sorted(layer for shard in mine for layer in group.layers_in(shard.layers))
        num = num_rows if isinstance(group.kind, StateRow) else num_pages
        for tensor in group.tensors:
            bases = tuple(Base(layer, len(sizes) + i, 0) for i, layer in enumerate(layers))
            placement = _dense(layout, group, tensor, len(mine[0].units), num, bases)
            placements.append(placement)
            sizes += [num * placement.page_stride] * len(layers)
    return Pools(PoolMap(tuple(placements)), tuple(sizes))


def _dense(
    layout: Layout,
    group: Group,
    tensor: Tensor,
    num_units: int,
    num_pages: int,
    bases: tuple[Base, ...],
) -> Placement:
    unit = tensor.unit_bytes
    page_tokens = 1 if isinstance(group.kind, StateRow) else layout.page_tokens
    by_head = layout.order is Order.HND
    return Placement(
        group=group.name,
        tensor=tensor.name,
        page_stride=page_tokens * num_units * unit,
        token_stride=unit if by_head else num_units * unit,
        unit_stride=page_tokens * unit if by_head else unit,
        num_pages=num_pages,
        bases=bases,
    )
