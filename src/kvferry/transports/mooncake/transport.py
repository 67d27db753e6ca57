"""The Mooncake transport: TCP by default, RDMA by configuration.

``write_thread`` carries the writes and calls ``on_completion``; ``poll`` only collects results.
Mooncake reads and writes peers' memory by address, so the regions of both sides are known here and
checked before anything is submitted.

Mooncake's ports are open to anybody who can reach this host, and over TCP anybody can read and
write registered memory. So only what must be is registered, and the network must be trusted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Region
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.bounds import RegionBounds, find_violation
from kvferry.transports.mailbox import Mailbox
from kvferry.transports.metadata import MAX_REGIONS, Size, decode_metadata
from kvferry.transports.mooncake import package
from kvferry.transports.mooncake.write_thread import (
    MooncakePiece,
    MooncakeWrite,
    MooncakeWriteThread,
    PeerQueue,
)
from kvferry.transports.single_descriptor import single_descriptor

# ``protocol``: tcp or rdma. ``device``: the RDMA devices to use, as in "mlx5_0,mlx5_1". Mooncake
# takes all other settings from the environment (MC_...).
OPTIONS = {"protocol": "tcp", "device": ""}


class _MooncakePlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region: address and size."""

    address: Size
    num_bytes: Size


class _MooncakeMetadata(msgspec.Struct, frozen=True, tag="mooncake", forbid_unknown_fields=True):
    """Metadata for peers: the engine's address, and the writable regions."""

    agent: Annotated[str, Meta(max_length=512)]
    host: Annotated[str, Meta(min_length=1, max_length=256)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    regions: Annotated[tuple[_MooncakePlace, ...], Meta(max_length=MAX_REGIONS)]


class _MooncakePeer(RemoteMemory):
    """A peer's regions, and the queue of writes to it."""

    def __init__(self, theirs: _MooncakeMetadata, queue: PeerQueue) -> None:
        self.bounds = RegionBounds(tuple(place.num_bytes for place in theirs.regions))
        self.addresses = np.array([place.address for place in theirs.regions], dtype=np.int64)
        self.queue = queue
        self.is_disconnected = False


class MooncakeTransport(Transport):
    """One Mooncake transfer engine."""

    name: ClassVar[str] = "mooncake"
    listens_on_all_addresses: ClassVar[bool] = True
    option_names: ClassVar[tuple[str, ...]] = tuple(OPTIONS)

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._options = setup.resolve_options(self.name, OPTIONS)
        self._engine: Any = package.start(setup.host, **self._options)
        self._ended: Mailbox[WriteEnded] = Mailbox()
        self._thread = MooncakeWriteThread(self._engine, self._report)
        self._addresses = np.zeros(0, dtype=np.int64)
        self._bounds = RegionBounds(())
        self._registered: list[int] = []
        self._writable: tuple[Region, ...] = ()
        # The agents that were seen at each (host, port), in the order of their appearance.
        self._agents: dict[tuple[str, int], list[str]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Return what to install before Mooncake can be used; None if it is there."""
        return package.missing()

    @property
    def realm(self) -> str:
        """The protocol: TCP and RDMA engines cannot connect to each other."""
        return f"{self.name}:{self._options['protocol']}"

    # ------------------------------------------------------------ memory and peers

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Register memory of the host, and of GPUs if Mooncake was built for them."""
        if not all(at.device.is_host for at in regions) and not package.load().SUPPORT_CUDA:
            raise TransportError(
                "this build of Mooncake carries host memory only; for pools on a GPU: "
                "pip install mooncake-transfer-engine"
            )
        # TCP sends from any memory; RDMA only from registered memory.
        if writable or self._options["protocol"] != "tcp":
            for region in regions:
                self._register(region)
        self.regions = tuple(regions)
        self._addresses = np.array([at.address for at in regions], dtype=np.int64)
        self._bounds = RegionBounds(tuple(at.num_bytes for at in regions))
        self._writable = self.regions if writable else ()

    def _register(self, region: Region) -> None:
        if not region.num_bytes:
            return
        location = "*" if region.device.is_host else str(region.device)
        code = self._engine.register_memory(region.address, region.num_bytes, location)
        if code:
            raise TransportError(
                f"Mooncake cannot register {region.num_bytes} bytes on {region.device} "
                f"(its code is {code}); set MC_LOG_LEVEL=INFO for details"
            )
        self._registered.append(region.address)

    def metadata(self) -> bytes:
        """Return the engine's address, and the regions if peers may write them."""
        places = tuple(_MooncakePlace(at.address, at.num_bytes) for at in self._writable)
        port = self._engine.get_rpc_port()
        return msgspec.msgpack.encode(
            _MooncakeMetadata(self.setup.agent, self.setup.host, port, places)
        )

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Add the peer's engine. The network connection is opened in the background."""
        theirs = decode_metadata(self.name, metadata, _MooncakeMetadata)
        remote = _MooncakePeer(theirs, PeerQueue(self._name_of(theirs)))
        self._thread.connect(remote.queue)
        return remote

    def _name_of(self, theirs: _MooncakeMetadata) -> str:
        """Return the peer's name for Mooncake, which never was another agent's.

        Mooncake caches what it found at an address for ever. Another agent at the same host and
        port therefore needs another spelling of the address: "1.2.3.4:017" instead of ":17".
        """
        agents = self._agents.setdefault((theirs.host, theirs.port), [])
        if theirs.agent not in agents:
            agents.append(theirs.agent)
        return f"{_bracketed(theirs.host)}:{'0' * agents.index(theirs.agent)}{theirs.port}"

    # ------------------------------------------------------------ writes

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Hand the write to the write thread."""
        assert isinstance(remote, _MooncakePeer)
        assert not remote.is_disconnected, "a write comes before disconnect"
        found = self._pieces(remote, pieces)
        if isinstance(found, str):
            self._report(WriteEnded(op, WriteFate.FAILED, found))
        else:
            self._thread.submit(remote.queue, MooncakeWrite(op, found))

    def _pieces(self, remote: _MooncakePeer, binding: Binding) -> list[MooncakePiece] | str:
        """Return the pieces by address, or which of them is outside the regions."""
        single = single_descriptor(binding)
        if single and single.length and single.fits(self._bounds.sizes, remote.bounds.sizes):
            ours = self.regions[single.source_region].address + single.source_offset
            theirs = int(remote.addresses[single.target_region]) + single.target_offset
            return [MooncakePiece(ours, theirs, single.length)]
        outside = find_violation(binding, self._bounds, remote.bounds)
        if outside:
            return outside
        pieces = binding.merged().descriptors()
        columns = (
            self._addresses[pieces.source_region] + pieces.source_offset,
            remote.addresses[pieces.target_region] + pieces.target_offset,
            pieces.length,
        )
        rows = zip(*(column[pieces.length > 0].tolist() for column in columns), strict=True)
        return [MooncakePiece(*row) for row in rows]

    def _report(self, ended: WriteEnded) -> None:
        self._ended.put(ended)
        self.on_completion()

    def poll(self) -> list[WriteEnded]:
        """Return the results that the write thread has reported."""
        return self._ended.drain(0)

    # ------------------------------------------------------------ the end

    def disconnect(self, remote: RemoteMemory) -> None:
        """End the reports of this connection. Its writes go on until they have ended."""
        assert isinstance(remote, _MooncakePeer)
        if not remote.is_disconnected:
            remote.is_disconnected = True
            self._thread.disconnect(remote.queue)

    def close(self) -> None:
        """Shut the engine down. Local memory is not read after that."""
        if self._engine is None:
            return
        is_unused = self._thread.stop()
        for address in self._registered:
            self._engine.unregister_memory(address)
        with package.silenced() as is_silent:
            if is_unused and is_silent:
                package.stop_listening(self._engine.get_rpc_port())
            # The engine is destroyed with its last reference.
            del self._thread
            self._engine = None
        self._registered = []
        self.regions = self._writable = ()


def _bracketed(host: str) -> str:
    """Put an IPv6 address into brackets."""
    with suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            return f"[{host}]"
    return host
