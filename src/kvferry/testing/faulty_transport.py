"""A transport that damages content: what a proof of content must find.

A fault changes the binding of one write before the wrapped transport takes it, so each transport
reports success. Faults work between processes and on any transport. Those of layers, tensors and
states need the pieces of a write, so they wait for a write that is not staged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.ids import Op
from kvferry.layout.spec import CacheSpec, StateRow
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Int64s
from kvferry.protocol.events import WriteFate
from kvferry.regions import Region
from kvferry.transports.base import RemoteMemory, Transport, WriteEnded

# Attributes that describe the transport.
_FLAGS = (
    *("name", "option_names", "listens_on_all_addresses", "maps_peer", "supports_write_now"),
    *("write_now_is_async", "needs_polling"),
)


class ContentFault(StrEnum):
    """Ways to damage content."""

    FLIP_BYTE = "flip-byte"
    DROP_STATE = "drop-state"
    SWAP_LAYERS = "swap-layers"
    SWAP_KV = "swap-kv"
    STALE_PAGE = "stale-page"
    SHORT_WRITE = "short-write"

    @property
    def needs_pieces(self) -> bool:
        """Whether the fault can't be made in a staged write."""
        return self in (ContentFault.DROP_STATE, ContentFault.SWAP_LAYERS, ContentFault.SWAP_KV)


class FaultyTransport(Transport):
    """A transport that makes one fault, in the first write in which it is possible.

    ``made`` counts the faults that were made.
    """

    def __init__(self, inner: Transport, fault: ContentFault, spec: CacheSpec) -> None:
        super().__init__(inner.setup)
        vars(self).update({flag: getattr(inner, flag) for flag in _FLAGS})
        self._inner = inner
        self._fault = fault
        self._states = {group.name for group in spec.groups if isinstance(group.kind, StateRow)}
        self.made = 0
        self._op: Op | None = None
        inner.on_completion = self._completed

    def _damaged(self, op: Op, pieces: Binding) -> Binding:
        # Writes that measure a link have negative numbers.
        if self.made or op < 0 or not pieces.num_bytes:
            return pieces
        damaged = self._damage(pieces)
        if damaged is None:
            return pieces
        self.made, self._op = 1, op
        return damaged

    def _ended(self, ended: WriteEnded) -> None:
        """Make the fault again if its write was not submitted, and is tried again."""
        if ended.op == self._op and ended.fate is WriteFate.BUSY:
            self.made = 0

    def _damage(self, pieces: Binding) -> Binding | None:
        match self._fault:
            case ContentFault.FLIP_BYTE:
                return flip_byte(pieces, self.regions)
            case ContentFault.DROP_STATE:
                return drop_groups(pieces, self._states)
            case ContentFault.SWAP_LAYERS:
                return swap_layers(pieces)
            case ContentFault.SWAP_KV:
                return swap_tensors(pieces)
            case ContentFault.STALE_PAGE:
                return drop_page(pieces)
            case ContentFault.SHORT_WRITE:
                return shorten(pieces)

    def _completed(self) -> None:
        self.on_completion()

    # ------------------------------------------------------------ writes

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Start a write, damaged if the fault was not made yet."""
        self._inner.write(remote, op, self._damaged(op, pieces))

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Write on the calling thread, damaged if the fault was not made yet."""
        ended = self._inner.write_now(remote, op, self._damaged(op, pieces))
        if ended is not None:
            self._ended(ended)
        return ended

    def prebind(self, remote: RemoteMemory, pieces: Binding) -> None:
        """Prepare for a ``write_now``."""
        self._inner.prebind(remote, pieces)

    def check_write(self, op: Op) -> WriteEnded | None:
        """Return the result of a write that ``write_now`` left in flight."""
        return self._inner.check_write(op)

    def poll(self) -> list[WriteEnded]:
        """Return the results of writes that ended since the last call."""
        ended = self._inner.poll()
        self.poll_again = self._inner.poll_again
        for one in ended:
            self._ended(one)
        return ended

    # ------------------------------------------------------------ all else

    @classmethod
    def missing(cls) -> str | None:
        """Return None: the wrapped transport exists."""
        return None

    @property
    def realm(self) -> str:
        """Reachability domain."""
        return self._inner.realm

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that can be registered."""
        return self._inner.allocate(num_bytes)

    def adopt(self, arrays: Iterable[Any]) -> None:
        """Make an engine's own arrays writable by peers."""
        self._inner.adopt(arrays)

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Register this endpoint's memory."""
        self.regions = tuple(regions)
        self._inner.register(regions, writable=writable)

    def metadata(self) -> bytes:
        """Return what a peer needs in order to connect."""
        return self._inner.metadata()

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Connect to a peer."""
        return self._inner.connect(metadata)

    def disconnect(self, remote: RemoteMemory) -> None:
        """Forget a peer."""
        self._inner.disconnect(remote)

    def close(self) -> None:
        """Release every resource."""
        self._inner.close()


# ---------------------------------------------------------------- faults
#
# Each returns the damaged binding, or None if the fault is impossible in this one.


def drop_groups(pieces: Binding, groups: set[str]) -> Binding | None:
    """Leave out the last tensor of some groups, if it is not the only one of the write."""
    mine = [at for at, part in enumerate(pieces.parts) if part.group in groups]
    if not mine or len(pieces.parts) == 1:
        return None
    return Binding((*pieces.parts[: mine[-1]], *pieces.parts[mine[-1] + 1 :]))


def swap_layers(pieces: Binding) -> Binding | None:
    """Write two layers of a tensor into each other's places."""
    for at, part in enumerate(pieces.parts):
        if part.num_layers > 1:
            one, two, *rest = part.target_bases
            return _replaced(pieces, at, part._replace(target_bases=(two, one, *rest)))
    return None


def swap_tensors(pieces: Binding) -> Binding | None:
    """Write two tensors of a group, such as K and V, into each other's places."""
    for at in range(len(pieces.parts) - 1):
        one, two = pieces.parts[at : at + 2]
        if one.group == two.group != "" and one.pieces is two.pieces:
            swapped = (
                one._replace(target_bases=two.target_bases),
                two._replace(target_bases=one.target_bases),
            )
            return Binding((*pieces.parts[:at], *swapped, *pieces.parts[at + 2 :]))
    return None


def drop_page(pieces: Binding) -> Binding | None:
    """Leave out a tensor's first segment, so that what was there before stays there."""
    part = pieces.parts[0]
    lengths = part.pieces.lengths
    if len(lengths) > 1:
        kept = part.pieces.select(np.arange(1, len(lengths)))
        return _replaced(pieces, 0, part._replace(pieces=kept))
    return _with_piece(pieces, lambda at, to, length: _cut(at, to, length, length // 2))


def shorten(pieces: Binding) -> Binding | None:
    """Leave out the last bytes of a piece."""
    return _with_piece(pieces, lambda at, to, length: _cut(at, to, length, 8))


def _cut(source: int, target: int, length: int, num_bytes: int) -> list[tuple[int, int, int]]:
    """Return a piece without its last bytes."""
    return [(source, target, max(0, length - max(1, num_bytes)))]


def flip_byte(pieces: Binding, regions: Sequence[Region]) -> Binding | None:
    """Write another byte of the same piece in the place of its first one.

    A GPU's memory can't be read here, so there it is a few bytes, which differ in all likelihood.
    """
    base = pieces.parts[0].source_bases[0]
    region = regions[base.region]

    def flipped(source: int, target: int, length: int) -> list[tuple[int, int, int]]:
        size, other = min(16, length // 2), length // 2
        if region.device.is_host:
            content = ctypes.string_at(region.address + base.offset + source, length)
            differing = (i for i in range(1, length) if content[i] != content[0])
            size, other = 1, next(differing, 0)
        return [
            (source + other, target, size),
            (source + size, target + size, length - size),
        ]

    return _with_piece(pieces, flipped)


def _replaced(pieces: Binding, at: int, part: BindingPart) -> Binding:
    return Binding((*pieces.parts[:at], part, *pieces.parts[at + 1 :]))


def _with_piece(
    pieces: Binding, change: Callable[[int, int, int], list[tuple[int, int, int]]]
) -> Binding:
    """Replace the first piece of the first layer of the first tensor by others."""
    part, *others = pieces.parts
    source, target, lengths = part.pieces.expand()
    changed = change(int(source[0]), int(target[0]), int(lengths[0]))
    columns = np.array([piece for piece in changed if piece[2]], dtype=np.int64).reshape(-1, 3).T
    rest = (source[1:], target[1:], lengths[1:])
    flat = [np.concatenate(both) for both in zip(columns, rest, strict=True)]
    first = part._replace(
        source_bases=part.source_bases[:1], target_bases=part.target_bases[:1], pieces=_flat(*flat)
    )
    layers = part._replace(source_bases=part.source_bases[1:], target_bases=part.target_bases[1:])
    return Binding((first, *([layers] if layers.num_layers else []), *others))


def _flat(source: Int64s, target: Int64s, lengths: Int64s) -> Pieces:
    one = np.ones(len(lengths), dtype=np.int64)
    return Pieces(source, target, lengths, one, one, Stride(0, 0), Stride(0, 0), whole_pages=False)
