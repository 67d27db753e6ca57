"""The shared-memory transport: a source maps its target's pools and copies straight into place.

Nothing to install, one host, host memory. A write is over when ``write`` returns,
so nothing is ever in flight, and a peer that is stopped holds nobody up. A target
that has died is not noticed here: its memory stays for as long as we map it, and
what we write there harms nobody. Heartbeats notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Region
from kvferry.transports import bounds, segments, torch_memory
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.bounds import Limits
from kvferry.transports.segments import Mapping, NamedMemory, Segment

MAX_REGIONS = 1 << 16

# So much of a peer's memory is mapped page by page when we connect, which takes about 0.1 s;
# the first writes into the rest take twice as long as later ones.
TOUCHED_BYTES = 512 << 20

_Name = Annotated[str, Meta(pattern=segments.NAME_PATTERN)]
_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _ShmPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region: which segment, and where in it."""

    segment: Annotated[int, Meta(ge=0, lt=MAX_REGIONS)]
    offset: _Size
    num_bytes: _Size

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class _ShmMetadata(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """What peers may write: segments by name, regions in their order."""

    segments: Annotated[tuple[_Name, ...], Meta(max_length=MAX_REGIONS)]
    regions: Annotated[tuple[_ShmPlace, ...], Meta(max_length=MAX_REGIONS)]


def _lengths(metadata: _ShmMetadata) -> list[int]:
    """How much of each segment the regions reach."""
    lengths = [0] * len(metadata.segments)
    for place in metadata.regions:
        lengths[place.segment] = max(lengths[place.segment], place.end)
    return lengths


class _Mapped(RemoteMemory):
    """A peer's segments in our memory."""

    def __init__(self, metadata: _ShmMetadata) -> None:
        self.limits = Limits([place.num_bytes for place in metadata.regions])
        self._mappings: list[Mapping] = []
        try:
            for name, num_bytes in zip(metadata.segments, _lengths(metadata), strict=True):
                self._mappings.append(segments.attach(name, num_bytes))
        except TransportError:
            self.close()
            raise
        left = TOUCHED_BYTES
        for mapping in self._mappings:
            left -= mapping.touch(left)
        bases = [mapping.address for mapping in self._mappings]
        self.addresses = [bases[place.segment] + place.offset for place in metadata.regions]

    def close(self) -> None:
        """Unmap; what is written later lies outside."""
        self.limits, self.addresses = Limits(()), []
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []


class ShmTransport(Transport):
    """Pools in POSIX shared memory, copied into directly."""

    name: ClassVar[str] = "shm"
    maps_peer: ClassVar[bool] = True
    writes_at_once: ClassVar[bool] = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._segments: list[NamedMemory] = []
        self._remotes: set[_Mapped] = set()
        self._ended: list[WriteEnded] = []
        self._metadata = _ShmMetadata((), ())
        self._limits = Limits(())
        self._addresses: list[int] = []
        segments.remove_leftovers()

    @classmethod
    def missing(cls) -> str | None:
        """Whether shared memory works here."""
        return segments.problem()

    @property
    def realm(self) -> str:
        """This host, and the segments that this process sees."""
        return f"{self.name}:{segments.space()}"

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Shared memory. Its name goes with ``close``, the memory with its last view."""
        segment = Segment(num_bytes)
        self._segments.append(segment)
        return segment.mapping.array

    def adopt(self, arrays: Iterable[Any]) -> None:
        """Move torch tensors into shared memory, in place: views of them stay views."""
        torch_memory.share(arrays)

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Take host memory; what peers write into must be shared memory."""
        if any(not region.device.is_host for region in regions):
            raise TransportError(
                "the shm transport carries host memory only; use cuda or nixl for pools on a GPU"
            )
        if writable:
            places = tuple(self._place(region) for region in regions)
            names = tuple(segment.name for segment in self._segments)
            self._metadata = _ShmMetadata(names, places)
        self.regions = tuple(regions)
        self._limits = Limits([region.num_bytes for region in regions])
        self._addresses = [region.address for region in regions]

    def _place(self, region: Region) -> _ShmPlace:
        for index, segment in enumerate(self._segments):
            offset = region.address - segment.address
            if offset >= 0 and offset + region.num_bytes <= segment.num_bytes:
                return _ShmPlace(index, offset, region.num_bytes)
        linked = segments.linked(region.address, region.num_bytes)
        if linked is None:
            raise TransportError(
                f"a pool of {region.num_bytes} bytes is not in shared memory, so peers can't write "
                f"it; make it with the transport's allocate(), or give torch tensors as pools"
            )
        self._segments.append(linked)
        offset = region.address - linked.address
        return _ShmPlace(len(self._segments) - 1, offset, region.num_bytes)

    def metadata(self) -> bytes:
        """The names of our segments, and where the regions lie in them."""
        return msgspec.msgpack.encode(self._metadata)

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Map the peer's segments."""
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_ShmMetadata)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the peer's shm metadata can't be read ({error}); run one version of kvferry"
            ) from error
        if any(place.segment >= len(theirs.segments) for place in theirs.regions):
            raise TransportError("the peer's shm metadata names a segment that it does not list")
        remote = _Mapped(theirs)
        self._remotes.add(remote)
        return remote

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Copy, here and now, and tell of it later."""
        self._ended.append(self.write_now(remote, op, pieces))
        self.on_news()

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded:
        """Copy. Nothing of ours changes by it, so any number of threads may."""
        assert isinstance(remote, _Mapped)
        outside = bounds.problem(pieces, self._limits, remote.limits)
        if outside:
            return WriteEnded(op, WriteFate.FAILED, outside)
        try:
            self.setup.copy(pieces, self._addresses, remote.addresses)
        except Exception as error:  # One write fails, whatever the copy ran into.
            return WriteEnded(
                op, WriteFate.FAILED, f"copying failed ({type(error).__name__}: {error})"
            )
        return WriteEnded(op, None)

    def poll(self) -> list[WriteEnded]:
        """What was copied since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, remote: RemoteMemory) -> None:
        """Unmap the peer's segments."""
        assert isinstance(remote, _Mapped)
        self._remotes.discard(remote)
        remote.close()

    def close(self) -> None:
        """Unmap everything and take our names away."""
        for remote in list(self._remotes):
            self.disconnect(remote)
        for segment in self._segments:
            segment.close()
        self._segments = []
        self.regions, self._limits = (), Limits(())
