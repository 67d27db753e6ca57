"""Metadata that NIXL endpoints exchange, and the state that each keeps per peer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.regions import Device, Region
from kvferry.transports.base import RemoteMemory
from kvferry.transports.metadata import MAX_REGIONS, Size
from kvferry.transports.nixl.batches import NixlMemory
from kvferry.transports.nixl.lists import CellLists
from kvferry.transports.single_descriptor import SingleDescriptor

# Completed transfer handles that are kept per peer.
MAX_HANDLES = 64
# NIXL's own metadata has 44 bytes for each registered region.
_MAX_AGENT_BYTES = 64 << 20


class _NixlPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region: address, size and device."""

    address: Size
    num_bytes: Size
    kind: Literal["cpu", "cuda"]
    number: Annotated[int, Meta(ge=0, lt=1 << 16)]


class NixlMetadata(msgspec.Struct, frozen=True, tag="nixl", forbid_unknown_fields=True):
    """Metadata for peers: the agent's name, NIXL's own metadata, and the writable regions."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    agent: Annotated[bytes, Meta(max_length=_MAX_AGENT_BYTES)]
    regions: Annotated[tuple[_NixlPlace, ...], Meta(max_length=MAX_REGIONS)]


def encode_metadata(name: str, agent: bytes, regions: Sequence[Region]) -> bytes:
    """Return the metadata for peers."""
    places = [(at.address, at.num_bytes, *at.device) for at in regions]
    fields = {"name": name, "agent": agent, "regions": places}
    return msgspec.msgpack.encode(msgspec.convert(fields | {"type": "nixl"}, NixlMetadata))


def release(handle: Any) -> None:
    """Release a transfer handle. This does not stop the transfer."""
    with suppress(Exception):
        handle.release()


class DescriptorHandles:
    """LRU cache of completed single-piece transfer handles, for posting the same piece again.

    Staging slots are reused in turn, and making a handle costs as much as posting it.
    """

    def __init__(self) -> None:
        self._handles: OrderedDict[SingleDescriptor, Any] = OrderedDict()

    def acquire(self, piece: SingleDescriptor | None) -> Any:
        """Take the handle of this piece out of the cache; None if there is none."""
        return None if piece is None else self._handles.pop(piece, None)

    def keep(self, piece: SingleDescriptor | None, handle: Any) -> None:
        """Put a completed handle into the cache, or release it if it cannot be reused."""
        if piece is None or piece in self._handles:
            release(handle)
            return
        self._handles[piece] = handle
        if len(self._handles) > MAX_HANDLES:
            release(self._handles.popitem(last=False)[1])

    def clear(self) -> None:
        """Release all handles."""
        while self._handles:
            release(self._handles.popitem()[1])


class NixlPeer:
    """A remote agent, which NIXL knows while it is connected or has writes in flight."""

    def __init__(self, theirs: NixlMetadata) -> None:
        self.name = theirs.name
        self.memory = NixlMemory(
            [Region(at.address, at.num_bytes, Device(at.kind, at.number)) for at in theirs.regions]
        )
        self.num_connections = 0
        self.num_writes = 0
        self.handles = DescriptorHandles()
        self.lists = CellLists(self.memory, self.name)
        # NIXL cannot repair a connection: it must be closed and opened again.
        self.is_broken = False

    def release(self) -> None:
        """Release what NIXL keeps for this agent, before the agent is removed."""
        self.handles.clear()
        self.lists.clear()

    @property
    def is_needed(self) -> bool:
        """Whether the agent is in use. Writes in flight use its memory keys."""
        return bool(self.num_connections or self.num_writes)


class NixlConnection(RemoteMemory):
    """One connection to a peer. A peer may have several."""

    def __init__(self, peer: NixlPeer) -> None:
        self.peer = peer
        self.is_disconnected = False
