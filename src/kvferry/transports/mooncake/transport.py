"""Mooncake's transfer engine: TCP by default, RDMA by configuration.

Writes are carried by one thread (``courier``), which calls ``on_news`` when one
has ended; ``poll`` only collects. Mooncake reads and writes peers' memory by address, so
both sides' regions are known here and checked before anything is submitted.

Mooncake's ports are open to whoever can reach this host, and over TCP they let anybody
read and write what is registered. So nothing is registered that need not be, and the
network must be one that is trusted.
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
from kvferry.transports import bounds, options
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.mailbox import Mailbox
from kvferry.transports.mooncake import package
from kvferry.transports.mooncake.courier import Courier, CourierWrite, MooncakePiece, PeerQueue
from kvferry.transports.single_descriptor import single

MAX_REGIONS = 1 << 16
# ``protocol``: tcp or rdma. ``device``: the RDMA devices to use, as in "mlx5_0,mlx5_1".
# What else Mooncake can be told, it takes from the environment (MC_...).
OPTIONS = {"protocol": "tcp", "device": ""}

_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _MooncakePlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region."""

    address: _Size
    num_bytes: _Size


class _MooncakeMetadata(msgspec.Struct, frozen=True, tag="mooncake", forbid_unknown_fields=True):
    """What peers may write, and where the engine is."""

    agent: Annotated[str, Meta(max_length=512)]
    host: Annotated[str, Meta(min_length=1, max_length=256)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    regions: Annotated[tuple[_MooncakePlace, ...], Meta(max_length=MAX_REGIONS)]


class _Connected(RemoteMemory):
    """A peer's regions, and the lane to it."""

    def __init__(self, theirs: _MooncakeMetadata, lane: PeerQueue) -> None:
        self.sizes = tuple(place.num_bytes for place in theirs.regions)
        self.addresses = np.array([place.address for place in theirs.regions], dtype=np.int64)
        self.lane = lane
        self.is_left = False


class MooncakeTransport(Transport):
    """One transfer engine."""

    name: ClassVar[str] = "mooncake"
    listens_everywhere: ClassVar[bool] = True
    option_names: ClassVar[tuple[str, ...]] = tuple(OPTIONS)

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        self._options = options.chosen(self.name, setup, OPTIONS)
        self._engine: Any = package.start(setup.host, **self._options)
        self._news: Mailbox[WriteEnded] = Mailbox()
        self._courier = Courier(self._engine, self._tell)
        self._addresses = np.zeros(0, dtype=np.int64)
        self._sizes: tuple[int, ...] = ()
        self._registered: list[int] = []
        self._public: tuple[Region, ...] = ()
        # Who has been met at which place, in the order of their appearance.
        self._met: dict[tuple[str, int], list[str]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Whether Mooncake can be loaded."""
        return package.missing()

    @property
    def realm(self) -> str:
        """TCP and RDMA do not meet."""
        return f"{self.name}:{self._options['protocol']}"

    # ------------------------------------------------------------ memory and peers

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Take memory of the host, and of GPUs where Mooncake was built for them."""
        if not all(at.device.is_host for at in regions) and not package.load().SUPPORT_CUDA:
            raise TransportError(
                "this build of Mooncake carries host memory only; for pools on a GPU: "
                "pip install mooncake-transfer-engine"
            )
        # TCP sends from any memory. RDMA needs to know it.
        if writable or self._options["protocol"] != "tcp":
            for region in regions:
                self._register(region)
        self.regions = tuple(regions)
        self._addresses = np.array([at.address for at in regions], dtype=np.int64)
        self._sizes = tuple(at.num_bytes for at in regions)
        self._public = self.regions if writable else ()

    def _register(self, region: Region) -> None:
        if not region.num_bytes:
            return
        where = "*" if region.device.is_host else str(region.device)
        code = self._engine.register_memory(region.address, region.num_bytes, where)
        if code:
            raise TransportError(
                f"Mooncake can't use a region of {region.num_bytes} bytes on {region.device} "
                f"(it says {code}); MC_LOG_LEVEL=INFO tells more"
            )
        self._registered.append(region.address)

    def metadata(self) -> bytes:
        """Where the engine is, and the regions if peers may write them."""
        places = tuple(_MooncakePlace(at.address, at.num_bytes) for at in self._public)
        port = self._engine.get_rpc_port()
        return msgspec.msgpack.encode(
            _MooncakeMetadata(self.setup.agent, self.setup.host, port, places)
        )

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Get to know a peer's engine. The connection itself is made in the background."""
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_MooncakeMetadata)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the peer's mooncake metadata can't be read ({error}); run one version of kvferry"
            ) from error
        remote = _Connected(theirs, PeerQueue(self._name_of(theirs)))
        self._courier.open(remote.lane)
        return remote

    def _name_of(self, theirs: _MooncakeMetadata) -> str:
        """What Mooncake knows the peer by: never what it knew another by.

        It remembers for ever what it found at a place. Somebody else who comes to be at
        that place, by the same port, must have another name, and "1.2.3.4:017" is one.
        """
        met = self._met.setdefault((theirs.host, theirs.port), [])
        if theirs.agent not in met:
            met.append(theirs.agent)
        return f"{_bracketed(theirs.host)}:{'0' * met.index(theirs.agent)}{theirs.port}"

    # ------------------------------------------------------------ writes

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Give it to the courier."""
        assert isinstance(remote, _Connected)
        assert not remote.is_left, "a write comes before disconnect"
        todo = self._pieces(remote, pieces)
        if isinstance(todo, str):
            self._tell(WriteEnded(op, WriteFate.FAILED, todo))
        else:
            self._courier.submit(remote.lane, CourierWrite(op, todo))

    def _pieces(self, remote: _Connected, binding: Binding) -> list[MooncakePiece] | str:
        """By address, or which of them lies outside."""
        only = single(binding)
        if only and only.length and only.fits(self._sizes, remote.sizes):
            ours = self.regions[only.source_region].address + only.source_offset
            theirs = int(remote.addresses[only.target_region]) + only.target_offset
            return [MooncakePiece(ours, theirs, only.length)]
        outside = bounds.problem(binding, self._sizes, remote.sizes)
        if outside:
            return outside
        named = binding.merged().descriptors()
        columns = (
            self._addresses[named.source_region] + named.source_offset,
            remote.addresses[named.target_region] + named.target_offset,
            named.length,
        )
        rows = zip(*(column[named.length > 0].tolist() for column in columns), strict=True)
        return [MooncakePiece(*row) for row in rows]

    def _tell(self, ended: WriteEnded) -> None:
        self._news.put(ended)
        self.on_news()

    def poll(self) -> list[WriteEnded]:
        """What the courier has told."""
        return self._news.drain(0)

    # ------------------------------------------------------------ the end

    def disconnect(self, remote: RemoteMemory) -> None:
        """Say no more of its writes, which go on until they have ended."""
        assert isinstance(remote, _Connected)
        if not remote.is_left:
            remote.is_left = True
            self._courier.leave(remote.lane)

    def close(self) -> None:
        """End the engine. Nothing reads our memory after that."""
        if self._engine is None:
            return
        unused = self._courier.stop()
        for address in self._registered:
            self._engine.unregister_memory(address)
        with package.hushed() as is_quiet:
            if unused and is_quiet:
                package.stop_listening(self._engine.get_rpc_port())
            # The engine ends with its last user.
            del self._courier
            self._engine = None
        self._registered = []
        self.regions = self._public = ()


def _bracketed(host: str) -> str:
    """IPv6 addresses have colons of their own."""
    with suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            return f"[{host}]"
    return host
