"""An engine's pools as regions, and the placement of each tensor in them.

Arrays are torch tensors, numpy arrays or objects with the same attributes. torch is not imported
here. Only addresses and strides are read, so views work: K and V packed in one tensor are two views
of it. Overlapping views share a region.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.layout import Layout, Order
from kvferry.layout.spec import Group, StateRow, Tensor
from kvferry.plan.places import Base, Placement, PoolMap, contiguous_pools
from kvferry.regions import HOST, Device, Region

# One array per layer in ascending order, or by layer number, or an array with a leading layer axis.
Layers = Sequence[Any] | Mapping[int, Any] | Any
# Arrays by group and tensor.
PoolArrays = Mapping[str, Mapping[str, Layers]]
# Returns an array of this many bytes, such as a transport's ``allocate``.
Allocate = Callable[[int], NDArray[np.uint8]]


class Memory(NamedTuple):
    """One rank's pools. ``owners`` keep the memory alive."""

    map: PoolMap
    regions: tuple[Region, ...]
    owners: object = None

    @staticmethod
    def at(
        pools: PoolMap, regions: Sequence[Region | tuple[int, int] | tuple[int, int, str]]
    ) -> Memory:
        """Return pools given by placements and raw ``(pointer, length, device)``."""
        given = tuple(_region(entry) for entry in regions)
        named = {base.region for placement in pools.placements for base in placement.bases}
        if named and max(named) >= len(given):
            raise InputError(
                f"a placement names region {max(named)}, but only {len(given)} were given"
            )
        return Memory(pools, given)

    @staticmethod
    def of(layout: Layout, rank: int, pools: PoolArrays) -> Memory:
        """Return pools given as arrays of ``[pages, tokens, units, ...]``, or units before tokens.

        The layout's order decides which. The last axis of a transposed tensor, its elements, may
        have any stride. Arrays of state rows have no token axis. A group of
        which this rank holds one unit needs no unit axis.
        """
        views: list[_View] = []
        for group, num_units, layers in _held(layout, rank):
            for tensor in group.tensors:
                arrays = _by_layer(group, tensor, layers, pools)
                axes = _Axes.of(layout, group, tensor, num_units)
                views += [_view(group, tensor, axes, layer, arrays[layer]) for layer in layers]
        regions = _regions(views)
        return Memory(PoolMap(tuple(_placements(views, regions))), regions, owners=pools)

    @staticmethod
    def allocate(
        layout: Layout, rank: int, num_pages: int, allocate: Allocate, num_rows: int = 1
    ) -> Memory:
        """Return dense pools in memory from ``allocate``. ``owners`` are its arrays, by region."""
        pools = contiguous_pools(layout, rank, num_pages, num_rows)
        arrays = [allocate(num_bytes) for num_bytes in pools.region_bytes]
        return Memory(pools.map, tuple(Region(a.ctypes.data, a.nbytes) for a in arrays), arrays)

    @property
    def device(self) -> Device:
        """The device of all regions. Raises ``InputError`` if there are several."""
        devices = {region.device for region in self.regions}
        if len(devices) > 1:
            raise InputError(
                "the pools of one endpoint lie on several devices; use an endpoint for each device"
            )
        return devices.pop() if devices else HOST


def arrays_of(pools: PoolArrays) -> Iterator[Any]:
    """Return every array of the pools."""
    for tensors in pools.values():
        for layers in tensors.values():
            yield from layers.values() if isinstance(layers, Mapping) else layers


def _region(entry: Region | tuple[int, int] | tuple[int, int, str]) -> Region:
    address, num_bytes, *rest = entry
    device = rest[0] if rest else HOST
    return Region(
        address, num_bytes, device if isinstance(device, Device) else Device.parse(device)
    )


def _held(layout: Layout, rank: int) -> list[tuple[Group, int, tuple[int, ...]]]:
    """Return each group of which the rank holds a shard, with its number of units and layers."""
    held = layout.rank_shards(rank)
    found = []
    for group in layout.spec.groups:
        mine = [shard for shard in held if shard.group == group.name]
        if mine:
            layers = sorted(layer for h in mine for layer in group.layers_in(h.layers))
            found.append((group, len(mine[0].units), tuple(layers)))
    return found


def _by_layer(
    group: Group, tensor: Tensor, layers: tuple[int, ...], pools: PoolArrays
) -> dict[int, Any]:
    name = f"{group.name}.{tensor.name}"
    try:
        given = pools[group.name][tensor.name]
    except KeyError:
        raise InputError(
            f"no pool for {name}; pass pools={{{group.name!r}: {{{tensor.name!r}: [...]}}}}"
        ) from None
    if isinstance(given, Mapping):
        missing = [layer for layer in layers if layer not in given]
        if missing:
            raise InputError(f"{name} has no array for layer {missing[0]}")
        return {layer: given[layer] for layer in layers}
    if len(given) != len(layers):
        raise InputError(
            f"{name} has {len(given)} arrays, but this rank holds {len(layers)} layers of it"
        )
    return dict(zip(layers, given, strict=True))


# ---------------------------------------------------------------- one array


class _Axes(NamedTuple):
    """The expected axes after the page axis. ``num_tokens`` is None if there is no token axis.

    ``is_transposed``: the elements of a unit are not contiguous.
    """

    num_tokens: int | None
    num_units: int
    units_first: bool
    is_transposed: bool

    @staticmethod
    def of(layout: Layout, group: Group, tensor: Tensor, num_units: int) -> _Axes:
        num_tokens = None if isinstance(group.kind, StateRow) else layout.page_entries(group)
        is_transposed = layout.is_transposed(group.name, tensor.name)
        return _Axes(num_tokens, num_units, layout.order is Order.HND, is_transposed)

    def shape(self) -> list[int]:
        """Return the sizes of the token and unit axes, in order."""
        if self.num_tokens is None:
            return [self.num_units]
        both = [self.num_tokens, self.num_units]
        return both[::-1] if self.units_first else both


class _ArrayInfo(NamedTuple):
    """Address, shape and strides in bytes of an array of any library."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: Device


class _View(NamedTuple):
    """One layer of one tensor as strides in a region."""

    group: str
    tensor: str
    layer: int
    num_pages: int
    page_stride: int
    token_stride: int
    unit_stride: int
    element_stride: int | None
    region: Region

    @property
    def strides(self) -> tuple[int | None, ...]:
        strides = self.page_stride, self.token_stride, self.unit_stride, self.element_stride
        return *strides, self.num_pages


def _array_info(array: Any) -> _ArrayInfo:
    """Return address, shape and strides of a torch tensor or a numpy array."""
    if hasattr(array, "data_ptr"):
        size = int(array.element_size())
        strides = tuple(int(stride) * size for stride in array.stride())
        device = Device.parse(str(array.device))
        return _ArrayInfo(int(array.data_ptr()), tuple(array.shape), strides, size, device)
    if hasattr(array, "__array_interface__"):
        address = int(array.__array_interface__["data"][0])
        return _ArrayInfo(address, array.shape, array.strides, array.itemsize, HOST)
    raise InputError(
        f"a pool must be a torch tensor or a numpy array, not {type(array).__name__}; "
        f"for raw pointers use Memory.at"
    )


def _view(group: Group, tensor: Tensor, axes: _Axes, layer: int, array: Any) -> _View:
    raw = _array_info(array)
    middle = axes.shape()
    unit_bytes = tensor.unit_bytes
    if not _fits(raw, middle, unit_bytes) and axes.num_units == 1:
        middle = [] if axes.num_tokens is None else [axes.num_tokens]
    if not _fits(raw, middle, unit_bytes):
        wanted = ", ".join(["pages", *map(str, axes.shape()), "..."])
        raise InputError(
            f"{group.name}.{tensor.name} of layer {layer} has shape {list(raw.shape)} of "
            f"{raw.itemsize} bytes each; its layout needs [{wanted}], {unit_bytes} bytes per unit"
        )
    if axes.is_transposed:
        _check_transposed(group, tensor, layer, raw)
    elif not _dense(raw, 1 + len(middle)):
        raise InputError(
            f"{group.name}.{tensor.name} of layer {layer} has gaps inside a unit; "
            f"the axes after the units must be contiguous"
        )
    strides = dict(zip(middle and _names(axes, middle), raw.strides[1:], strict=False))
    extent = sum((n - 1) * s for n, s in zip(raw.shape, raw.strides, strict=True)) + raw.itemsize
    return _View(
        group.name,
        tensor.name,
        layer,
        raw.shape[0],
        raw.strides[0],
        strides.get("tokens", 0),
        strides.get("units", unit_bytes),
        raw.strides[-1] if axes.is_transposed else None,
        Region(raw.address, extent, raw.device),
    )


def _check_transposed(group: Group, tensor: Tensor, layer: int, raw: _ArrayInfo) -> None:
    """Refuse a transposed tensor without an axis of elements, or on a GPU."""
    where = f"{group.name}.{tensor.name} of layer {layer}"
    if (raw.shape[-1], raw.itemsize) != (tensor.elements, tensor.dtype.num_bytes):
        raise InputError(
            f"{where} is transposed, so its last axis must have the {tensor.elements} elements of "
            f"{tensor.dtype}, not {raw.shape[-1]} of {raw.itemsize} bytes"
        )
    if not raw.device.is_host:
        raise InputError(f"{where} is transposed, which is supported in host memory only")


def _names(axes: _Axes, middle: list[int]) -> list[str]:
    if axes.num_tokens is None:
        return ["units"]
    if len(middle) == 1:
        return ["tokens"]
    return ["units", "tokens"] if axes.units_first else ["tokens", "units"]


def _fits(raw: _ArrayInfo, middle: list[int], unit_bytes: int) -> bool:
    rest = raw.shape[1 + len(middle) :]
    return (
        len(raw.shape) >= 1 + len(middle)
        and raw.shape[0] > 0
        and list(raw.shape[1 : 1 + len(middle)]) == middle
        and math.prod(rest) * raw.itemsize == unit_bytes
        and min(raw.strides) >= 0
    )


def _dense(raw: _ArrayInfo, axis: int) -> bool:
    """Return whether the axes from ``axis`` on are C-contiguous."""
    expected = raw.itemsize
    for size, stride in reversed(list(zip(raw.shape[axis:], raw.strides[axis:], strict=True))):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


# ---------------------------------------------------------------- all of them


def _regions(views: Sequence[_View]) -> tuple[Region, ...]:
    """Return the views' regions, with overlapping ones merged.

    Adjacent regions are not merged, because they may be separate allocations.
    """
    merged: list[Region] = []
    for region in sorted({view.region for view in views}, key=lambda r: (r.device, r.address)):
        last = merged[-1] if merged else None
        if last and last.device == region.device and region.address < last.end:
            end = max(last.end, region.end)
            merged[-1] = Region(last.address, end - last.address, last.device)
        else:
            merged.append(region)
    return tuple(merged)


def _placements(views: Sequence[_View], regions: tuple[Region, ...]) -> list[Placement]:
    by_tensor: dict[tuple[str, str], list[_View]] = {}
    for view in views:
        by_tensor.setdefault((view.group, view.tensor), []).append(view)
    return [_placement(same, regions) for same in by_tensor.values()]


def _placement(views: list[_View], regions: tuple[Region, ...]) -> Placement:
    first = views[0]
    for view in views:
        if view.strides != first.strides:
            raise InputError(
                f"{view.group}.{view.tensor} has different strides or numbers of pages in "
                f"layers {view.layer} and {first.layer}; allocate all layers alike"
            )
    bases = tuple(_base(view, regions) for view in views)
    return Placement(
        first.group,
        first.tensor,
        first.page_stride,
        first.token_stride,
        first.unit_stride,
        first.num_pages,
        bases,
        first.element_stride,
    )


def _base(view: _View, regions: tuple[Region, ...]) -> Base:
    for index, region in enumerate(regions):
        inside = region.address <= view.region.address and view.region.end <= region.end
        if inside and region.device == view.region.device:
            return Base(view.layer, index, view.region.address - region.address)
    raise AssertionError("every view is in a region")
