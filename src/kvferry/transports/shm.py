"""The shared-memory transport: a source maps its target's pools and copies into them directly.

It needs no installation and works on one host, with host memory. A write has ended when ``write``
returns, so nothing is ever in flight and a stopped peer blocks nobody. A dead target is not
detected here: its memory stays while it is mapped, and writes into it do no harm. The liveness
probe detects the death.
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
from kvferry.transports import bounds, segments
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.bounds import RegionBounds
from kvferry.transports.metadata import MAX_REGIONS, Size, decode_metadata
from kvferry.transports.segments import LinkedSegment, MappedSegment, Segment
from kvferry.transports.torch_memory import share_tensors

# How much of a peer's memory is mapped page by page in ``connect``, which takes about 0.1 s. The
# first write into the rest takes twice as long as later ones.
POPULATED_BYTES = 512 << 20

_Name = Annotated[str, Meta(pattern=segments.NAME_PATTERN)]


class _ShmPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region as a part of a segment, which is given by its index in the metadata."""

    segment: Annotated[int, Meta(ge=0, lt=MAX_REGIONS)]
    offset: Size
    num_bytes: Size

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class _ShmMetadata(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """Metadata for peers: the names of segments, and the writable regions in their order."""

    segments: Annotated[tuple[_Name, ...], Meta(max_length=MAX_REGIONS)]
    regions: Annotated[tuple[_ShmPlace, ...], Meta(max_length=MAX_REGIONS)]


class _ShmPeer(RemoteMemory):
    """A peer's segments, mapped into this process."""

    def __init__(self, metadata: _ShmMetadata) -> None:
        self.bounds = RegionBounds([place.num_bytes for place in metadata.regions])
        self._mappings: list[MappedSegment] = []
        lengths = [0] * len(metadata.segments)
        for place in metadata.regions:
            lengths[place.segment] = max(lengths[place.segment], place.end)
        try:
            for name, num_bytes in zip(metadata.segments, lengths, strict=True):
                self._mappings.append(segments.attach(name, num_bytes))
        except TransportError:
            self.close()
            raise
        left = POPULATED_BYTES
        for mapping in self._mappings:
            left -= mapping.populate(left)
        starts = [mapping.address for mapping in self._mappings]
        self.addresses = [starts[place.segment] + place.offset for place in metadata.regions]

    def close(self) -> None:
        """Unmap the segments. Later writes are outside the bounds and fail."""
        self.bounds, self.addresses = RegionBounds(()), []
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []


class ShmTransport(Transport):
    """Writes into a peer's POSIX shared memory by copying."""

    name: ClassVar[str] = "shm"
    maps_peer: ClassVar[bool] = True
    supports_write_now: ClassVar[bool] = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._segments: list[Segment | LinkedSegment] = []
        self._remotes: set[_ShmPeer] = set()
        self._ended: list[WriteEnded] = []
        self._metadata = _ShmMetadata((), ())
        self._bounds = RegionBounds(())
        self._addresses: list[int] = []
        segments.remove_leftovers()

    @classmethod
    def missing(cls) -> str | None:
        """Return why shared memory does not work here; None if it does."""
        return segments.problem()

    @property
    def realm(self) -> str:
        """Host and /dev/shm."""
        return f"{self.name}:{segments.space()}"

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return shared memory. ``close`` unlinks it; the last view frees it."""
        segment = Segment(num_bytes)
        self._segments.append(segment)
        return segment.mapping.array

    def adopt(self, arrays: Iterable[Any]) -> None:
        """Move torch tensors into shared memory, in place; their views follow."""
        share_tensors(arrays)

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Register host memory. Writable regions must be in shared memory."""
        if any(not region.device.is_host for region in regions):
            raise TransportError(
                "the shm transport carries host memory only; use cuda or nixl for pools on a GPU"
            )
        if writable:
            places = tuple(self._place(region) for region in regions)
            names = tuple(segment.name for segment in self._segments)
            self._metadata = _ShmMetadata(names, places)
        self.regions = tuple(regions)
        self._bounds = RegionBounds([region.num_bytes for region in regions])
        self._addresses = [region.address for region in regions]

    def _place(self, region: Region) -> _ShmPlace:
        for index, segment in enumerate(self._segments):
            offset = region.address - segment.address
            if offset >= 0 and offset + region.num_bytes <= segment.num_bytes:
                return _ShmPlace(index, offset, region.num_bytes)
        linked = segments.link(region.address, region.num_bytes)
        if linked is None:
            raise TransportError(
                f"a pool of {region.num_bytes} bytes is not in shared memory, so peers cannot "
                f"write it; allocate it with the transport's allocate(), or use torch tensors"
            )
        self._segments.append(linked)
        offset = region.address - linked.address
        return _ShmPlace(len(self._segments) - 1, offset, region.num_bytes)

    def metadata(self) -> bytes:
        """Return the names of the segments, and the places of the regions in them."""
        return msgspec.msgpack.encode(self._metadata)

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Map the peer's segments."""
        theirs = decode_metadata(self.name, metadata, _ShmMetadata)
        if any(place.segment >= len(theirs.segments) for place in theirs.regions):
            raise TransportError(
                "the peer's shm metadata has a region in a segment that it does not list; "
                "run one version of kvferry"
            )
        remote = _ShmPeer(theirs)
        self._remotes.add(remote)
        return remote

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Copy, and keep the result for ``poll``."""
        self._ended.append(self.write_now(remote, op, pieces))
        self.on_completion()

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded:
        """Copy. Changes no state, so any number of threads may call it at once."""
        assert isinstance(remote, _ShmPeer)
        outside = bounds.find_violation(pieces, self._bounds, remote.bounds)
        if outside:
            return WriteEnded(op, WriteFate.FAILED, outside)
        try:
            self.setup.copy(pieces, self._addresses, remote.addresses)
        except Exception as error:  # Whatever the copy raises fails only this write.
            return WriteEnded(
                op, WriteFate.FAILED, f"copying failed ({type(error).__name__}: {error})"
            )
        return WriteEnded(op, None)

    def poll(self) -> list[WriteEnded]:
        """Return the results of the writes that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def disconnect(self, remote: RemoteMemory) -> None:
        """Unmap the peer's segments."""
        assert isinstance(remote, _ShmPeer)
        self._remotes.discard(remote)
        remote.close()

    def close(self) -> None:
        """Unmap the peers' segments and unlink this endpoint's."""
        for remote in list(self._remotes):
            self.disconnect(remote)
        for segment in self._segments:
            segment.close()
        self._segments = []
        self.regions, self._bounds = (), RegionBounds(())
