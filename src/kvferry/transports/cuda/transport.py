"""The cuda transport: a source maps its target's pools, and its GPU writes into them directly.

For GPUs of one host. One pass over the bytes, without staging: the target exports its allocations
(``exports``), the source maps them once in ``connect`` (``maps``), and a write is one launch of
the copy kernel from local pages into the peer's. A launch takes less time than waking another
thread, so any thread may launch a write with ``write_now`` and query the GPU for its end. For
writes submitted by ``write``, a thread waits (``copy_waiter``). ``prebind`` checks a binding ahead
of its write and uploads its table to the GPU.

The target takes no part in a write, so a stopped target delays nobody. A dead target is not
detected here, because its memory stays while it is mapped; the liveness probe detects it. A
mapping is closed by ``disconnect``, or after the last write that was in flight then.
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
from kvferry.transports import bounds
from kvferry.transports.base import (
    DeviceCopier,
    DeviceEvent,
    RemoteMemory,
    Transport,
    TransportSetup,
    WriteEnded,
)
from kvferry.transports.bounds import RegionBounds
from kvferry.transports.cuda import driver
from kvferry.transports.cuda.copy_waiter import CopyWaiter, gpu_failed
from kvferry.transports.cuda.driver import DriverError, Gpu
from kvferry.transports.cuda.exports import ExportedMemory, Span, SpanPlace
from kvferry.transports.cuda.maps import Exporter, MappedSpan
from kvferry.transports.cuda.pidfd import start_ticks
from kvferry.transports.host_id import host_id
from kvferry.transports.metadata import MAX_REGIONS, decode_metadata

# Prepared copies that are kept. The oldest is dropped first, and its write prepares it again.
MAX_PREBOUND = 64

_Key = Annotated[bytes, Meta(min_length=16, max_length=16)]


class _CudaMetadata(msgspec.Struct, frozen=True, tag="cuda", forbid_unknown_fields=True):
    """Metadata for peers: spans of the memory of one GPU of one process, and regions in them.

    ``life`` is the transport's secret: a process recognises its own memory by it, and proves with
    it that it exported the memory.
    """

    life: _Key
    proof: Annotated[int, Meta(ge=0, lt=1 << 31)]
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    began: Annotated[int, Meta(ge=0, lt=1 << 62)]
    gpu: _Key
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_REGIONS)]
    regions: Annotated[tuple[SpanPlace, ...], Meta(max_length=MAX_REGIONS)]


# A process cannot open its own handles. For connections within it, the exports by their secret.
_own_exports: dict[bytes, ExportedMemory] = {}


class _CudaPeer(RemoteMemory):
    """A peer's regions, mapped into this process."""

    def __init__(self, gpu: Gpu, theirs: _CudaMetadata) -> None:
        self.num_writes = 0
        self.is_disconnected = False
        self._mappings: list[MappedSpan] = []
        bases = self._bases(gpu, theirs)
        self.bounds = RegionBounds([place.num_bytes for place in theirs.regions])
        self.addresses = tuple(
            bases[place.span] + place.offset if place.num_bytes else 0 for place in theirs.regions
        )

    def _bases(self, gpu: Gpu, theirs: _CudaMetadata) -> list[int]:
        own = _own_exports.get(theirs.life)
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
        """Unmap the spans. Later writes are outside the bounds and fail."""
        self.bounds, self.addresses = RegionBounds(()), ()
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []


class _CopyInFlight(NamedTuple):
    """A write in flight, or one whose launch failed and may have been launched in part."""

    remote: _CudaPeer
    op: Op
    problem: str = ""


class _Prebound(NamedTuple):
    """A binding that may be written soon, with its prepared copy.

    Holding the binding keeps its ``id()`` unique.
    """

    remote: _CudaPeer
    binding: Binding
    copy: Any


class _DrainEvent:
    """Completion of a copy whose launch failed half-way: that of everything on the GPU."""

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier

    def query(self) -> bool:
        self._copier.drain()
        return True

    def synchronize(self) -> None:
        self._copier.drain()


class CudaTransport(Transport):
    """Writes into a peer's GPU memory by a kernel on the local GPU."""

    name: ClassVar[str] = "cuda"
    maps_peer: ClassVar[bool] = True
    supports_write_now: ClassVar[bool] = True
    write_now_is_async: ClassVar[bool] = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        setup.resolve_options(self.name, {})
        self._life = secrets.token_bytes(16)
        self._gpu: Gpu | None = None
        self._copier: DeviceCopier | None = None
        self._waiter: CopyWaiter[_CopyInFlight] | None = None
        self._exports: ExportedMemory | None = None
        self._remotes: set[_CudaPeer] = set()
        self._ended: list[WriteEnded] = []
        # Writes launched by ``write_now``, and prepared bindings by ``id()``.
        self._launched: dict[Op, tuple[_CopyInFlight, DeviceEvent]] = {}
        self._prebound: dict[int, _Prebound] = {}
        self._bounds = RegionBounds(())
        self._addresses: tuple[int, ...] = ()
        # Held while a copy is launched and while writes are counted: one thread launches copies and
        # another receives their completions.
        self._lock = threading.Lock()

    @classmethod
    def missing(cls) -> str | None:
        """Return what to install before GPU memory can be mapped; None if nothing is missing."""
        return driver.missing()

    @property
    def realm(self) -> str:
        """Host, PID namespace and IPC namespace, within which handles are valid."""
        return f"{self.name}:{_realm()}"

    # ------------------------------------------------------------ memory and peers

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Register memory of one GPU."""
        device = _device_of(regions)
        self._gpu = Gpu(device.number)
        if writable:
            self._exports = _own_exports[self._life] = ExportedMemory(
                self._gpu, regions, self._life
            )
        else:
            self._copier = self.setup.copies_on(device)
        self.regions = tuple(regions)
        self._bounds = RegionBounds([region.num_bytes for region in regions])
        self._addresses = tuple(region.address for region in regions)

    def metadata(self) -> bytes:
        """Return the exported spans, and the places of the regions in them."""
        gpu = self._gpu.uuid if self._gpu else bytes(16)
        pid, began = os.getpid(), start_ticks(os.getpid())
        exports = self._exports
        exported = (exports.proof, exports.spans, exports.places) if exports else (0, (), ())
        proof, spans, places = exported
        return msgspec.msgpack.encode(
            _CudaMetadata(self._life, proof, pid, began, gpu, spans, places)
        )

    def connect(self, metadata: bytes) -> RemoteMemory:
        """Map the peer's spans."""
        theirs = decode_metadata(self.name, metadata, _CudaMetadata)
        _demand_inside(theirs)
        if self._gpu is None:
            raise TransportError("no memory is registered; call register() before connect()")
        if theirs.spans:
            _demand_reachable(self._gpu, theirs.gpu)
        remote = _CudaPeer(self._gpu, theirs)
        self._remotes.add(remote)
        return remote

    # ------------------------------------------------------------ writes

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Launch the copy, and let the waiter report its end."""
        with self._lock:
            launched = self._launch(remote, op, pieces)
            if isinstance(launched, WriteEnded):
                self._ended.append(launched)
            else:
                copying, event = launched
                self._running_waiter().watch(copying, event.synchronize)
        if isinstance(launched, WriteEnded):
            self.on_completion()

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Launch the copy on the calling thread."""
        with self._lock:
            launched = self._launch(remote, op, pieces)
            if isinstance(launched, WriteEnded):
                return launched
            self._launched[op] = launched
            return None

    def check_write(self, op: Op) -> WriteEnded | None:
        """Query the GPU."""
        with self._lock:
            copying, event = self._launched[op]
            problem = copying.problem
            try:
                if not event.query():
                    return None
            except Exception as error:  # CUDA errors, after which the GPU runs nothing more.
                problem = problem or gpu_failed(error)
            del self._launched[op]
            self._end(copying, problem)
            return self._ended.pop()

    def prebind(self, remote: RemoteMemory, pieces: Binding) -> None:
        """Check the bounds, and upload the table of the copy to the GPU."""
        assert isinstance(remote, _CudaPeer)
        with self._lock:
            if remote.is_disconnected or self._copier is None or id(pieces) in self._prebound:
                return
            if bounds.find_violation(pieces, self._bounds, remote.bounds):
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
    ) -> WriteEnded | tuple[_CopyInFlight, DeviceEvent]:
        """Launch a copy and return it with its event, or the result if nothing was launched."""
        assert isinstance(remote, _CudaPeer)
        assert not remote.is_disconnected, "a write comes before disconnect"
        prebound = self._prebound.pop(id(pieces), None)
        if prebound is None:
            outside = bounds.find_violation(pieces, self._bounds, remote.bounds)
            if outside:
                return WriteEnded(op, WriteFate.FAILED, outside)
        try:
            copier = self._get_copier()
        except Exception as error:  # Nothing was launched.
            return WriteEnded(op, WriteFate.FAILED, f"the GPU cannot copy ({error})")
        remote.num_writes += 1
        try:
            if prebound is None:
                copy = copier.prepare(pieces, self._addresses, remote.addresses)
            else:
                assert prebound.remote is remote, "each peer has bindings of its own"
                copy = prebound.copy
            return _CopyInFlight(remote, op), copier.start(copy)
        except Exception as error:  # Part of it may be running; drain waits for that.
            problem = f"copying failed ({type(error).__name__}: {error})"
            return _CopyInFlight(remote, op, problem), _DrainEvent(copier)

    def _get_copier(self) -> DeviceCopier:
        # A target gets a copier only when it writes.
        if self._copier is None:
            assert self._gpu is not None
            self._copier = self.setup.copies_on(Device("cuda", self._gpu.number))
        return self._copier

    def _running_waiter(self) -> CopyWaiter[_CopyInFlight]:
        if self._waiter is None:
            name = f"kvferry-cuda-waiter-{self.setup.agent}"
            self._waiter = CopyWaiter(self._notify, name)
        return self._waiter

    def _notify(self) -> None:
        self.on_completion()

    def poll(self) -> list[WriteEnded]:
        """Return the results since the last call."""
        with self._lock:
            if self._waiter is not None:
                for copying, problem in self._waiter.ended():
                    self._end(copying, copying.problem or problem)
            ended, self._ended = self._ended, []
        return ended

    def _end(self, copying: _CopyInFlight, problem: str) -> None:
        remote, fate = copying.remote, WriteFate.FAILED if problem else None
        self._ended.append(WriteEnded(copying.op, fate, problem))
        remote.num_writes -= 1
        if remote.is_disconnected:
            self._close_if_unused(remote)

    # ------------------------------------------------------------ the end

    def disconnect(self, remote: RemoteMemory) -> None:
        """Unmap the peer's memory, after the last write that is in flight."""
        assert isinstance(remote, _CudaPeer)
        with self._lock:
            remote.is_disconnected = True
            for key in [key for key, one in self._prebound.items() if one.remote is remote]:
                self._drop_prebound(key)
            self._close_if_unused(remote)

    def _close_if_unused(self, remote: _CudaPeer) -> None:
        if not remote.num_writes and remote in self._remotes:
            self._remotes.discard(remote)
            # Unmapping fails too after a failure of the GPU.
            with suppress(DriverError):
                remote.close()

    def close(self) -> None:
        """Wait for the GPU, unmap peers' memory, and close the exports."""
        if self._waiter is not None:
            self._waiter.close()
            self.poll()
            self._waiter = None
        self._drain()
        for remote in list(self._remotes):
            self.disconnect(remote)
        if self._exports is not None:
            del _own_exports[self._life]
            self._exports.close()
            self._exports = None
        self._copier, self._ended = None, []
        self.regions, self._addresses, self._bounds = (), (), RegionBounds(())

    def _drain(self) -> None:
        """Wait for the writes of ``write_now``. Their callers no longer ask for the results."""
        if self._copier is not None and self._launched:
            with suppress(Exception):  # CUDA errors, after which the GPU runs nothing more.
                self._copier.drain()
        with self._lock:
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
            f"the cuda transport takes memory of one GPU, not of {len(devices)}; "
            f"use one endpoint per GPU"
        )
    return devices.pop()


def _demand_inside(theirs: _CudaMetadata) -> None:
    """Raise ``TransportError`` unless every region lies in a listed span."""
    for place in theirs.regions:
        spans = theirs.spans[place.span : place.span + 1]
        if place.num_bytes and (not spans or place.end > spans[0].num_bytes):
            raise TransportError(
                "the peer's cuda metadata has a region outside its spans; "
                "run one version of kvferry"
            )


def _demand_reachable(ours: Gpu, uuid: bytes) -> None:
    number = driver.number_of(uuid)
    if number is None:
        raise TransportError(
            f"the peer's pools are on the GPU {uuid.hex()}, which this process cannot see; "
            f"add it to CUDA_VISIBLE_DEVICES and to the container, or use nixl"
        )
    if not ours.reaches(number):
        raise TransportError(
            f"cuda:{ours.number} cannot write the memory of cuda:{number}, where the peer's pools "
            f"are; choose GPUs that nvidia-smi topo -p2p w shows as OK, or use nixl"
        )


@cache
def _realm() -> str:
    words = [host_id()]
    for space in ("pid", "ipc"):
        with suppress(OSError):
            words.append(os.readlink(f"/proc/self/ns/{space}"))
    return ":".join(words)
