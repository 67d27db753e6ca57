"""Where a rank keeps its cache: strides and bases in registered regions, without addresses.

A placement gives, for one tensor of one group, the strides of pages, tokens and units, and where
each layer begins in a region. That describes NHD and HND, one tensor per layer or one for all, K
and V separate or packed. A transposed tensor also has a stride of elements. A pool map can be sent
to a peer; only the transport adds addresses.

Offsets have 64 bits. A placement that could give an offset of ``MAX_OFFSET`` or more is refused
when it is made, so arithmetic on offsets never overflows.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvferry.errors import InputError
from kvferry.layout.layout import MAX_PAGE_TOKENS, Layout, Order
from kvferry.layout.spec import MAX_ELEMENTS, MAX_UNITS, Group, StateRow, Tensor

Int64s = NDArray[np.int64]
MAX_OFFSET = 1 << 62
# Number of cached results of ``Placement.bases_of``.
MAX_CACHED_BASES = 1024


class Base(msgspec.Struct, frozen=True, array_like=True):
    """The region and offset at which one layer of a tensor begins."""

    layer: int
    region: int
    offset: int


# By the identity of a placement's bases and layers. The value holds the bases, so that their
# identity is not reused.
_cached_bases: dict[tuple[int, tuple[int, ...]], tuple[tuple[Base, ...], tuple[Base, ...]]] = {}


class Placement(msgspec.Struct, frozen=True):
    """Strides in bytes of one tensor, the same in every layer, and the base of each layer.

    In a state group a page is a state row, and ``token_stride`` is unused. ``element_stride`` is
    None if the elements of a unit are contiguous.
    """

    group: str
    tensor: str
    page_stride: int
    token_stride: int
    unit_stride: int
    num_pages: int
    bases: tuple[Base, ...]
    element_stride: int | None = None

    def __post_init__(self) -> None:
        numbers = [self.page_stride, self.token_stride, self.unit_stride, self.num_pages]
        numbers.append(self.element_stride or 0)
        numbers += [number for base in self.bases for number in (base.region, base.offset)]
        if min(numbers) < 0:
            raise InputError(
                f"{self.group}.{self.tensor} has a negative stride, offset, region or number "
                f"of pages; all must be 0 or more"
            )
        if max(*numbers, self._max_offset()) >= MAX_OFFSET:
            raise InputError(
                f"{self.group}.{self.tensor} could lie 2**62 bytes or more into its region; "
                f"use fewer or smaller pages"
            )

    def _max_offset(self) -> int:
        """Return a bound on the offset of every page, token and unit."""
        return (
            max((base.offset for base in self.bases), default=0)
            + self.num_pages * self.page_stride
            + MAX_PAGE_TOKENS * self.token_stride
            + MAX_UNITS * self.unit_stride
            + MAX_ELEMENTS * (self.element_stride or 0)
        )

    def bases_of(self, layers: tuple[int, ...]) -> tuple[Base, ...]:
        """Return the bases of these layers, in this order.

        Cached, because every write needs them, mostly for the same layers. A cached result is the
        same tuple every time.
        """
        key = id(self.bases), layers
        known = _cached_bases.get(key)
        # The identity may belong to another object by now.
        if known is None or known[0] is not self.bases:
            if len(_cached_bases) >= MAX_CACHED_BASES:
                _cached_bases.clear()
            known = _cached_bases[key] = self.bases, self._bases_of(layers)
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
    """All placements of one rank."""

    placements: tuple[Placement, ...]

    def of(self, group: str, tensor: str) -> Placement:
        """Return the placement of a tensor."""
        for placement in self.placements:
            if placement.group == group and placement.tensor == tensor:
                return placement
        raise InputError(f"{group}.{tensor} has no memory on this rank; register its pools")


class PageTable:
    """The pages of one request in one group, in token order.

    ``pages[i]`` holds the rank's local tokens from ``(first_page + i) * page_tokens`` on. A window
    group may leave out pages that it has dropped. In a state group the only entry is the request's
    state row.
    """

    __slots__ = ("first_page", "pages")

    def __init__(self, pages: ArrayLike, first_page: int = 0) -> None:
        try:
            # A copy that nobody changes, because bindings are cached by it.
            self.pages: Int64s = np.array(pages, dtype=np.int64)
        except (OverflowError, TypeError, ValueError):
            raise InputError("a page table is a flat list of 64-bit page numbers") from None
        self.pages.flags.writeable = False
        self.first_page = first_page
        if self.pages.ndim != 1 or not 0 <= first_page < MAX_OFFSET:
            raise InputError("a page table is a flat list of page numbers; first_page is 0 or more")

    @property
    def end_page(self) -> int:
        """One past the last page in the table."""
        return self.first_page + len(self.pages)

    def __repr__(self) -> str:
        return f"<PageTable {len(self.pages)} pages from page {self.first_page}>"


class Pools(NamedTuple):
    """A pool map, and the size of every region in it."""

    map: PoolMap
    region_bytes: tuple[int, ...]


def contiguous_pools(layout: Layout, rank: int, num_pages: int, num_rows: int = 1) -> Pools:
    """Return the simplest pools: a dense region for every layer of every tensor.

    The tensors of a packed group share one. ``num_rows`` is the number of rows in state groups.
    """
    placements: list[Placement] = []
    sizes: list[int] = []
    held = layout.rank_shards(rank)
    for group in layout.spec.groups:
        mine = [shard for shard in held if shard.group == group.name]
        if not mine:
            continue
        layers = sorted(layer for shard in mine for layer in group.layers_in(shard.layers))
        num = num_rows if isinstance(group.kind, StateRow) else num_pages
        units, is_packed, first = len(mine[0].units), group.name in layout.packed, 0
        for tensor in group.tensors:
            row = group.unit_bytes if is_packed else tensor.unit_bytes
            bases = tuple(Base(layer, len(sizes) + i, first) for i, layer in enumerate(layers))
            placement = _dense(layout, group, tensor, units, num, bases, row)
            placements.append(placement)
            first += tensor.unit_bytes if is_packed else 0
            if not is_packed or tensor is group.tensors[-1]:
                sizes += [num * placement.page_stride] * len(layers)
    return Pools(PoolMap(tuple(placements)), tuple(sizes))


def page_bytes(layout: Layout, rank: int) -> dict[str, int]:
    """Return the bytes that a rank keeps in a page of each of its groups, over all its layers."""
    sizes: dict[str, int] = {}
    for one in contiguous_pools(layout, rank, 1).map.placements:
        sizes[one.group] = sizes.get(one.group, 0) + one.page_stride * len(one.bases)
    return sizes


def _dense(
    layout: Layout,
    group: Group,
    tensor: Tensor,
    num_units: int,
    num_pages: int,
    bases: tuple[Base, ...],
    row_bytes: int,
) -> Placement:
    """Return the placement of a tensor whose units are ``row_bytes`` apart."""
    page_tokens = layout.page_entries(group)
    is_transposed = layout.is_transposed(group.name, tensor.name)
    by_head = layout.order is Order.HND or is_transposed
    width = tensor.dtype.num_bytes
    row_stride = row_bytes if by_head else num_units * row_bytes
    return Placement(
        group=group.name,
        tensor=tensor.name,
        page_stride=page_tokens * num_units * row_bytes,
        token_stride=width if is_transposed else row_stride,
        unit_stride=page_tokens * row_bytes if by_head else row_bytes,
        num_pages=num_pages,
        bases=bases,
        element_stride=page_tokens * width if is_transposed else None,
    )
