"""The cuda transport: a source maps its target's pools and its GPU writes straight into place.

For GPUs of one host. One pass over the bytes and no staging: the target tells how its
allocations can be mapped (``exports``), the source maps them once when it connects
(``maps``), and a write is one launch of the copy kernel from our pages into theirs.
To launch takes less time than to wake another thread for it, so whoever asks for a write may
launch it, and ask the GPU for its end; for others a thread waits (``waiter``). What is known
before it is written is checked then, and its table lies on the GPU already (``prebind``).

The target takes no part in a write, so one that is stopped holds nobody up, and one that
has died is not noticed here: its memory stays for as long as we map it. Heartbeats notice.
A mapping goes with ``disconnect``, or with the last write that was under way then.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.errors import KvferryError, TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Device, Region
from kvferry.transports import bounds, descriptors, options
from kvferry.transports.base import (
    DeviceCopier,
    DeviceEvent,
    RemoteMemory,
    Transport,
    TransportSetup,
    WriteEnded,
)
from kvferry.transports.bounds import Limits
from kvferry.transports.cuda import driver
from kvferry.transports.cuda.driver import DriverError, Gpu
from kvferry.transports.cuda.exports import MAX_REGIONS, Exports, Span, SpanPlace
from kvferry.transports.cuda.maps import Exporter, MappedSpan
from kvferry.transports.cuda.waiter import Waiter, gpu_failed
from kvferry.transports.host_id import boot

# Copies that are kept ready. What is announced and not written soon is worked out again.
MAX_PREBOUND = 64

_Key = Annotated[bytes, Meta(min_length=16, max_length=16)]


class _CudaMetadata(msgspec.Struct, frozen=True, tag="cuda", forbid_unknown_fields=True):
    """What peers may write: spans of the memory of one GPU of one process, and regions in them.

    ``life`` is a random number by which a process knows its own, and which it can prove.
    """

    life: _Key
    proof: Annotated[int, Meta(ge=0, lt=1 << 31)]
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    began: Annotated[int, Meta(ge=0, lt=1 << 62)]
    gpu: _Key
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_REGIONS)]
    regions: Annotated[tuple[SpanPlace, ...], Meta(max_length=MAX_REGIONS)]


# A handle can't be opened by the process that it is of; here it finds the memory itself.
_own: dict[bytes, Exports] = {}


class _MappedPeer(RemoteMemory):
    """A peer's regions in our address space."""

    def __init__(self, gpu: Gpu, theirs: _CudaMetadata) -> None:
        self.num_writes = 0
        self.is_left = False
        self._mappings: list[MappedSpan] = []
        bases = self._bases(gpu, theirs)
        self.limits = Limits([place.num_bytes for place in theirs.regions])
        self.addresses = tuple(
            bases[place.span] + place.offset if place.num_bytes else 0 for place in theirs.regions
        )

    def _bases(self, gpu: Gpu, theirs: _CudaMetadata) -> list[int]:
        own = _own.get(theirs.life)
        if own is not None and own.spans == theirs.spans:
            return own.addresses
        exporter = Exporter(theirs.pid, theirs.began, theirs.life, theirs.proof)
        try:
            for span in theirs.spans:
                self._mappings.append(MappedSpan(gpu, exporter, span))
        except TransportError:
            self.close()
            raise
        return [mapping.address for mapping in self._mappings]

    def close(self) -> None:
        """Unmap; what is written later lies outside."""
        self.limits, self.addresses = Limits(()), ()
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []


class _Copying(NamedTuple):
    """A write under way, or one that failed to start and may have started in part."""

    remote: _MappedPeer
    op: Op
    problem: str = ""


class _Prebound(NamedTuple):
    """A binding that may be written soon, and all of its copy but the start."""

    remote: _MappedPeer
    binding: Binding
    copy: Any


class _Drained:
    """The end of a copy of which nobody knows how far it was started: that of everything."""

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier

    def query(self) -> bool:
        self._copier.drain()
        return True

    def synchronize(self) -> None:
        self._copier.drain()


class CudaTransport(Transport):
    """Pools in GPU memory, written by a peer's GPU."""

    name: ClassVar[str] = "cuda"
    maps_peer: ClassVar[bool] = True
    writes_at_once: ClassVar[bool] = True
    writes_elsewhere: ClassVar[bool] = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        options.chosen(self.name, setup, {})
        self._life = secrets.token_bytes(16)
        self._gpu: Gpu | None = None
        self._copier: DeviceCopier | None = None
        self._waiter: Waiter[_Copying] | None = None
        self._exports: Exports | None = None
        self._remotes: set[_MappedPeer] = set()
        self._ended: list[WriteEnded] = []
        # Writes that were launched at once, and those that may be, by their binding's identity.
        self._launched: dict[Op, tuple[_Copying, DeviceEvent]] = {}
        self._prebound: dict[int, _Prebound] = {}
        self._limits = Limits(())
        self._addresses: tuple[int, ...] = ()
        # Held while a copy is launched and while writes are counted: one thread launches and
        # another hears of ends.
        self._turn = threading.Lock()

    @classmethod
    def missing(cls) -> str | None:
        """Whether GPU memory can be mapped here."""
        return driver.missing()

    @property
    def realm(self) -> str:
        """This host, and the processes that this one sees: a handle means nothing to others."""
        return f"{self.name}:{_realm()}"

    # ------------------------------------------------------------ memory and peers

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Take the memory of one GPU."""
        device = _device_of(regions)
        self._gpu = Gpu(device.number)
        if writable:
            self._exports = _own[self._life] = Exports(self._gpu, regions, self._life)
        else:
            self._copier = self.setup.copies_on(device)
        self.regions = tuple(regions)
        self._limits = Limits([region.num_bytes for region in regions])
        self._addresses = tuple(region.address for region in regions)

    def metadata(self) -> bytes:
        """How our memory can be mapped, and where the regions lie in it."""
        gpu = self._gpu.uuid if self._gpu else bytes(16)
        pid, began = os.getpid(), descriptors.started(os.getpid())
        ours = self._exports
        told = (ours.proof, ours.spans, ours.places) if ours else (0, (), ())
        proof, spans, places = told
        return msgspec.msgpack.encode(
            _CudaMetadata(self._life, proof, pid, began, gpu, spans, places)
        )

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Map the peer's memory."""
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_CudaMetadata)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the peer's cuda metadata can't be read ({error}); run one version of kvferry"
            ) from error
        _demand_inside(theirs)
        if self._gpu is None:
            raise TransportError("memory is registered before peers are connected")
        if theirs.spans:
            _demand_reachable(self._gpu, theirs.gpu)
        remote = _MappedPeer(self._gpu, theirs)
        self._remotes.add(remote)
        return remote

    # ------------------------------------------------------------ writes

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Launch the copy."""
        with self._turn:
            begun = self._launch(remote, op, pieces)
            if isinstance(begun, WriteEnded):
                self._ended.append(begun)
            else:
                copying, event = begun
                self._waits().watch(copying, event.synchronize)
        if isinstance(begun, WriteEnded):
            self.on_news()

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Launch the copy from any thread."""
        with self._turn:
            begun = self._launch(remote, op, pieces)
            if isinstance(begun, WriteEnded):
                return begun
            self._launched[op] = begun
            return None

    def look(self, op: Op) -> WriteEnded | None:
        """Ask the GPU."""
        with self._turn:
            copying, event = self._launched[op]
            problem = copying.problem
            try:
                if not event.query():
                    return None
            except Exception as error:  # Of CUDA, after which nothing runs on the GPU any more.
                problem = problem or gpu_failed(error)
            del self._launched[op]
            self._end(copying, problem)
            return self._ended.pop()

    def prebind(self, remote: RemoteMemory, pieces: Binding) -> None:
        """Check it, and send its table to the GPU."""
        assert isinstance(remote, _MappedPeer)
        with self._turn:
            if remote.is_left or self._copier is None or id(pieces) in self._prebound:
                return
            if bounds.problem(pieces, self._limits, remote.limits):
                return
            while len(self._prebound) >= MAX_PREBOUND:
                self._drop_prebound(next(iter(self._prebound)))
            with suppress(KvferryError):
                copy = self._copier.prepare(pieces, self._addresses, remote.addresses)
                self._prebound[id(pieces)] = _Prebound(remote, pieces, copy)

    def _drop_prebound(self, key: int) -> None:
        prebound = self._prebound.pop(key)
        assert self._copier is not None
        with suppress(KvferryError):
            self._copier.forget(prebound.copy)

    def _launch(
        self, remote: RemoteMemory, op: Op, pieces: Binding
    ) -> WriteEnded | tuple[_Copying, DeviceEvent]:
        """Launch, and give what tells of the end; or say why not."""
        assert isinstance(remote, _MappedPeer)
        assert not remote.is_left, "a write comes before disconnect"
        prebound = self._prebound.pop(id(pieces), None)
        if prebound is None:
            outside = bounds.problem(pieces, self._limits, remote.limits)
            if outside:
                return WriteEnded(op, WriteFate.FAILED, outside)
        try:
            copier = self._engine()
        except Exception as error:  # Nothing was launched.
            return WriteEnded(op, WriteFate.FAILED, f"the GPU can't copy ({error})")
        remote.num_writes += 1
        try:
            if prebound is None:
                copy = copier.prepare(pieces, self._addresses, remote.addresses)
            else:
                assert prebound.remote is remote, "each peer's pages are bound by themselves"
                copy = prebound.copy
            return _Copying(remote, op), copier.start(copy)
        except Exception as error:  # Some of it may have been launched: it is over after that.
            problem = f"copying failed ({type(error).__name__}: {error})"
            return _Copying(remote, op, problem), _Drained(copier)

    def _engine(self) -> DeviceCopier:
        """What copies; a target has it only if it writes too."""
        if self._copier is None:
            assert self._gpu is not None
            self._copier = self.setup.copies_on(Device("cuda", self._gpu.number))
        return self._copier

    def _waits(self) -> Waiter[_Copying]:
        """What waits for copies that nobody asks for."""
        if self._waiter is None:
            name = f"kvferry-cuda-waiter-{self.setup.agent}"
            self._waiter = Waiter(self._nudge, name)
        return self._waiter

    def _nudge(self) -> None:
        self.on_news()

    def poll(self) -> list[WriteEnded]:
        """What has ended since the last call."""
        with self._turn:
            if self._waiter is not None:
                for copying, problem in self._waiter.ended():
                    self._end(copying, copying.problem or problem)
            ended, self._ended = self._ended, []
        return ended

    def _end(self, copying: _Copying, problem: str) -> None:
        remote, fate = copying.remote, WriteFate.FAILED if problem else None
        self._ended.append(WriteEnded(copying.op, fate, problem))
        remote.num_writes -= 1
        if remote.is_left:
            self._let_go(remote)

    # ------------------------------------------------------------ the end

    def disconnect(self, remote: RemoteMemory) -> None:
        """Unmap the peer's memory once nothing is written to it any more."""
        assert isinstance(remote, _MappedPeer)
        with self._turn:
            remote.is_left = True
            for key in [key for key, one in self._prebound.items() if one.remote is remote]:
                self._drop_prebound(key)
            self._let_go(remote)

    def _let_go(self, remote: _MappedPeer) -> None:
        if not remote.num_writes and remote in self._remotes:
            self._remotes.discard(remote)
            with suppress(
                DriverError
            ):  # After a failure of the GPU nothing can be unmapped either.
                remote.close()

    def close(self) -> None:
        """Wait for the GPU, unmap everything, and let nobody map our memory any more."""
        if self._waiter is not None:
            self._waiter.close()
            self.poll()
            self._waiter = None
        self._drain()
        for remote in list(self._remotes):
            self.disconnect(remote)
        if self._exports is not None:
            del _own[self._life]
            self._exports.close()
            self._exports = None
        self._copier, self._ended = None, []
        self.regions, self._addresses, self._limits = (), (), Limits(())

    def _drain(self) -> None:
        """Let what was launched at once end. Whoever would have asked for it is gone."""
        if self._copier is not None and self._launched:
            with suppress(Exception):  # Of CUDA, after which nothing runs on the GPU any more.
                self._copier.drain()
        with self._turn:
            for copying, _ in self._launched.values():
                self._end(copying, copying.problem)
            self._launched = {}


def _device_of(regions: Sequence[Region]) -> Device:
    devices = {region.device for region in regions}
    if any(device.is_host for device in devices):
        raise TransportError(
            "the cuda transport carries GPU memory only; use shm or nixl for pools on the host"
        )
    if len(devices) != 1:
        raise TransportError(
            f"the cuda transport takes the memory of one GPU, not of {len(devices)}; "
            f"use one endpoint for each"
        )
    return devices.pop()


def _demand_inside(theirs: _CudaMetadata) -> None:
    """Every region lies in a span that is there."""
    for place in theirs.regions:
        if place.num_bytes and place.span >= len(theirs.spans):
            raise TransportError("the peer's cuda metadata names memory that it does not list")
        if place.num_bytes and place.end > theirs.spans[place.span].num_bytes:
            raise TransportError("the peer's cuda metadata has a region beyond its memory's end")


def _demand_reachable(ours: Gpu, uuid: bytes) -> None:
    number = driver.number_of(uuid)
    if number is None:
        raise TransportError(
            f"the peer's pools are on the GPU {uuid.hex()}, which this process can't see; "
            f"name it in CUDA_VISIBLE_DEVICES and give it to the container, or use nixl"
        )
    if not ours.reaches(number):
        raise TransportError(
            f"cuda:{ours.number} can't write the memory of cuda:{number}, where the peer's pools "
            f"are; nvidia-smi topo -p2p w shows which can, or use nixl"
        )


@cache
def _realm() -> str:
    """Handles are good within a host, and descriptors among processes that see each other."""
    words = [boot()]
    for space in ("pid", "ipc"):
        with suppress(OSError):
            words.append(os.readlink(f"/proc/self/ns/{space}"))
    return ":".join(words)
