"""What NIXL endpoints tell each other, and what each keeps of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.regions import Device, Region
from kvferry.transports.base import RemoteMemory
from kvferry.transports.nixl.batches import NixlMemory
from kvferry.transports.single_descriptor import Single

MAX_REGIONS = 1 << 16
# As many transfers to one peer are kept, to be posted again.
MAX_HANDLES = 64
# Registered regions make NIXL's own metadata, at 44 bytes each.
_MAX_AGENT_BYTES = 64 << 20

_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _NixlPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region."""

    address: _Size
    num_bytes: _Size
    kind: Literal["cpu", "cuda"]
    number: Annotated[int, Meta(ge=0, lt=1 << 16)]


class NixlMetadata(msgspec.Struct, frozen=True, tag="nixl", forbid_unknown_fields=True):
    """What peers may write, and who we are."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    agent: Annotated[bytes, Meta(max_length=_MAX_AGENT_BYTES)]
    regions: Annotated[tuple[_NixlPlace, ...], Meta(max_length=MAX_REGIONS)]


def encode(name: str, agent: bytes, regions: Sequence[Region]) -> bytes:
    """For a peer: our name, NIXL's own metadata, and the regions that it may write."""
    places = [(at.address, at.num_bytes, *at.device) for at in regions]
    fields = {"name": name, "agent": agent, "regions": places}
    return msgspec.msgpack.encode(msgspec.convert(fields | {"type": "nixl"}, NixlMetadata))


def decode(metadata: bytes) -> NixlMetadata:
    """From a peer. Raises ``TransportError``."""
    try:
        return msgspec.msgpack.decode(metadata, type=NixlMetadata)
    except msgspec.DecodeError as error:
        raise TransportError(
            f"the peer's nixl metadata can't be read ({error}); run one version of kvferry"
        ) from error


def release(handle: Any) -> None:
    """Give a transfer back to NIXL. That does not stop it."""
    with suppress(Exception):
        handle.release()


class DescriptorHandles:
    """Transfers of a single piece that are over, to be posted again: slots are used in turns.

    Making one costs as much as posting it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Single, Any] = OrderedDict()

    def acquire(self, piece: Single | None) -> Any:
        """The transfer of that piece, if there is one; nobody else has it then."""
        return None if piece is None else self._kept.pop(piece, None)

    def keep(self, piece: Single | None, handle: Any) -> None:
        """One that is over."""
        if piece is None or piece in self._kept:
            release(handle)
            return
        self._kept[piece] = handle
        if len(self._kept) > MAX_HANDLES:
            release(self._kept.popitem(last=False)[1])

    def clear(self) -> None:
        """Give all of them back."""
        while self._kept:
            release(self._kept.popitem()[1])


class NixlPeer:
    """An agent that NIXL knows, for as long as it is connected or written to."""

    def __init__(self, theirs: NixlMetadata) -> None:
        self.name = theirs.name
        self.memory = NixlMemory(
            [Region(at.address, at.num_bytes, Device(at.kind, at.number)) for at in theirs.regions]
        )
        self.num_remotes = 0
        self.num_writes = 0
        self.handles = DescriptorHandles()
        # NIXL can't mend a connection. It must be given up and made again.
        self.is_broken = False

    @property
    def is_needed(self) -> bool:
        """Its keys are in use while a write is under way."""
        return bool(self.num_remotes or self.num_writes)


class NixlConnection(RemoteMemory):
    """One connection to a peer, which may have others."""

    def __init__(self, peer: NixlPeer) -> None:
        self.peer = peer
        self.is_left = False
