"""The NIXL transport: RDMA, GPUs, and one kernel copy between processes of one host.

``poll`` drives all progress, over some networks also that of peers' writes into local memory.
NIXL's own progress thread stays off because it occupies a core. Whole pages are named by their
numbers in descriptor lists that are prepared once (``lists``); other pieces are listed for each
write (``batches``).

Writes have no notifications. A write with one would complete only after the target has polled
twice, even if the kernel copied its bytes before ``transfer`` returned (ADR 15).

NIXL cannot cancel a transfer. A write to a stopped peer stays in flight for as long as the peer is
stopped. After ``disconnect`` it is tracked without a report, because the connection may be closed
only when nothing of it is in flight.

An error after a batch was submitted means that the connection has broken. Local memory is no
longer read, but the peer may still receive bytes that were on their way, from buffers of its own
host, at any later time. So the fate of that write is UNKNOWN for as long as the peer's process may
live. Later writes fail until the peer has been disconnected and connected again, because NIXL does
not repair connections.

UCX listens on the network, and anybody who reaches it can write. With a loopback ``host`` it is
confined to the loopback device, unless the option ``ucx`` or ``UCX_NET_DEVICES`` says otherwise.
On any other host, the network must be trusted.
"""

from __future__ import annotations

import ipaddress
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Region
from kvferry.transports import bounds
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.metadata import decode_metadata
from kvferry.transports.nixl import package
from kvferry.transports.nixl.batches import (
    DescriptorBatch,
    NixlMemory,
    make_batches,
    memory_type,
    single_batch,
    small_batch,
)
from kvferry.transports.nixl.lists import CellBatch, CellLists, cell_batches
from kvferry.transports.nixl.peers import NixlConnection, NixlMetadata, NixlPeer, encode_metadata
from kvferry.transports.nixl.writes import NixlWrite
from kvferry.transports.single_descriptor import single_descriptor

# ``ucx``: UCX settings without their prefix, as in "TLS=tcp,NET_DEVICES=eth0". Environment
# variables (UCX_TLS etc.) take precedence.
OPTIONS = {"ucx": ""}

# A notification without content, sent only to open the connection.
_HELLO = b"g"
# The kernel copies between processes of one host. UCX's default of half a megabyte per call takes
# 1.5 times as long.
_LONG_COPIES = "CMA_SEG_SIZE=16m"
# How long one ``poll`` may go on submitting batches.
_POLL_S = 0.005
# How long ``write_now`` drives its write before it returns with the write in flight.
_DRIVE_S = 30e-6
# How long ``write_now`` waits for the agent. Handing the write to another thread takes longer, and
# the next write would find the agent in use again.
_LOCK_TIMEOUT_S = 50e-6

P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[Concatenate[NixlTransport, P], R]) -> Callable[..., R]:
    """Hold the agent's lock: NIXL has none, and ``write_now`` comes from another thread."""

    @wraps(method)
    def locked(self: NixlTransport, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class NixlTransport(Transport):
    """One NIXL agent, used by one thread at a time."""

    name: ClassVar[str] = "nixl"
    option_names: ClassVar[tuple[str, ...]] = tuple(OPTIONS)
    needs_polling: ClassVar[bool] = True
    supports_write_now: ClassVar[bool] = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        # NIXL identifies peers by name, so an agent that restarts needs another one.
        self._name = f"{setup.agent}.{secrets.token_hex(4)}"
        self._agent: Any = _make_agent(self._name, setup)
        self._lock = threading.Lock()
        self._memory = NixlMemory(())
        self._lists = CellLists(self._memory, "")
        self._registered: list[Any] = []
        self._writable: tuple[Region, ...] = ()
        self._peers: dict[str, NixlPeer] = {}
        self._writes: dict[NixlWrite, None] = {}
        self._ended: list[WriteEnded] = []
        # Writes that ``write_now`` left in flight, and their results for ``check_write``.
        self._immediate: dict[Op, NixlWrite] = {}
        self._immediate_ended: dict[Op, WriteEnded] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Return what to install before NIXL can be used; None if it is there."""
        return package.missing()

    # ------------------------------------------------------------ memory and peers

    @_locked
    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Register memory of the host and of GPUs."""
        for name in ("DRAM", "VRAM"):
            alike = [at for at in regions if at.num_bytes and memory_type(at.device) == name]
            rows = [(at.address, at.num_bytes, at.device.number, "") for at in alike]
            if rows:
                with _translated(f"NIXL cannot register {len(rows)} regions of {name} memory"):
                    self._registered.append(self._agent.register_memory(rows, name))
        self.regions = tuple(regions)
        self._memory = NixlMemory(regions)
        self._lists = CellLists(self._memory, "")
        self._writable = self.regions if writable else ()

    @_locked
    def metadata(self) -> bytes:
        """Return the agent's address, and its regions if peers may write them."""
        with _translated("NIXL cannot make metadata for peers"):
            if self._writable:
                agent = self._agent.get_agent_metadata()
            else:
                nothing = self._agent.get_reg_descs([(0, 0, 0, "")], "DRAM")
                nothing.clear()
                agent = self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        return encode_metadata(self._name, agent, self._writable)

    @_locked
    def connect(self, metadata: bytes) -> RemoteMemory:
        """Add the peer's agent. The network connection is opened in the background."""
        theirs = decode_metadata(self.name, metadata, NixlMetadata)
        peer = self._peers.get(theirs.name) or self._add_peer(theirs)
        if peer.is_broken:
            raise TransportError(
                f"the connection to {peer.name} broke and is being closed; connect again"
            )
        peer.num_connections += 1
        return NixlConnection(peer)

    def _add_peer(self, theirs: NixlMetadata) -> NixlPeer:
        with _translated(f"NIXL cannot reach {theirs.name}"):
            name = self._agent.add_remote_agent(theirs.agent).decode()
        if name != theirs.name:
            if name not in self._peers:
                self._remove_agent(name)
            raise TransportError(
                f"the peer's nixl metadata is for {name}, not for {theirs.name}; "
                f"run one version of kvferry"
            )
        # Opening the connection takes tens of milliseconds. Do it before the first write, which
        # reports the error if this fails.
        with suppress(Exception):
            self._agent.send_notif(name, _HELLO)
        peer = self._peers[name] = NixlPeer(theirs)
        return peer

    def _remove_agent(self, name: str) -> None:
        with suppress(Exception):  # NIXL may have removed it on its own.
            self._agent.remove_remote_agent(name)

    # ------------------------------------------------------------ writes

    @_locked
    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Submit the first batch. Between processes of one host this copies it."""
        self._start(remote, op, pieces)

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Submit the write and drive it for a moment. BUSY if the agent stays in use."""
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            return WriteEnded(op, WriteFate.BUSY, "the agent is in use")
        try:
            write = self._start(remote, op, pieces)
            deadline = time.monotonic() + _DRIVE_S
            while write in self._writes and time.monotonic() < deadline:
                self._step(write)
            if write is None or write not in self._writes:
                return self._ended.pop()
            self._immediate[op] = write
            return None
        finally:
            self._lock.release()

    def check_write(self, op: Op) -> WriteEnded | None:
        """Advance the write if the agent is free, and return its result if it has ended."""
        if op not in self._immediate_ended and self._lock.acquire(blocking=False):
            try:
                write = self._immediate.get(op)
                if write is not None:
                    self._step(write)
            finally:
                self._lock.release()
        return self._immediate_ended.pop(op, None)

    def _start(self, remote: RemoteMemory, op: Op, pieces: Binding) -> NixlWrite | None:
        """Start a write; None if it failed, with its result in ``_ended``."""
        assert isinstance(remote, NixlConnection)
        assert not remote.is_disconnected, "a write comes before disconnect"
        batches = self._batches(remote.peer, pieces)
        if isinstance(batches, str):
            self._ended.append(WriteEnded(op, WriteFate.FAILED, batches))
            return None
        write = NixlWrite(remote, op, batches)
        remote.peer.num_writes += 1
        self._writes[write] = None
        self._step(write)
        return write

    def _batches(
        self, peer: NixlPeer, pieces: Binding
    ) -> Sequence[DescriptorBatch | CellBatch] | str:
        """Return the batches of a write, or why it cannot be made."""
        if peer.is_broken:
            return f"the connection to {peer.name} is broken"
        ours, theirs = self._memory, peer.memory
        single = single_descriptor(pieces)
        if single and single.length and single.fits(ours.sizes, theirs.sizes):
            return [single_batch(single, ours, theirs)]
        outside = bounds.find_violation(pieces, ours.bounds, theirs.bounds)
        return (
            outside
            or cell_batches(pieces, self._lists, peer.lists, self._agent)
            or small_batch(pieces, ours, theirs)
            or make_batches(pieces, ours, theirs)
        )

    @_locked
    def poll(self) -> list[WriteEnded]:
        """Advance every write, for a few milliseconds at most, and return the results."""
        if self._agent is None:
            return []
        # This also drives peers' writes into local memory. Their errors appear in those writes.
        with suppress(Exception):
            self._agent.get_new_notifs()
        deadline = time.monotonic() + _POLL_S
        moving = list(self._writes)
        while moving and time.monotonic() < deadline:
            moving = [write for write in moving if self._step(write)]
        self.poll_again = bool(moving)
        ended, self._ended = self._ended, []
        return ended

    def _step(self, write: NixlWrite) -> bool:
        """Advance a write; return whether it can submit another batch right away."""
        try:
            write.progress(self._agent)
        except Exception as error:
            write.remote.peer.is_broken = True
            self._end(write, WriteFate.UNKNOWN, _text(error))
            return False
        if write.is_over:
            self._end(write, WriteFate.FAILED if write.problem else None, write.problem)
        return write.can_submit

    def _end(self, write: NixlWrite, fate: WriteFate | None, detail: str = "") -> None:
        if not write.remote.is_disconnected:
            self._report(WriteEnded(write.op, fate, detail))
        del self._writes[write]
        write.release()
        write.remote.peer.num_writes -= 1
        self._remove_if_unused(write.remote.peer)

    def _report(self, ended: WriteEnded) -> None:
        if self._immediate.pop(ended.op, None) is None:
            self._ended.append(ended)
        else:
            self._immediate_ended[ended.op] = ended

    # ------------------------------------------------------------ the end

    @_locked
    def disconnect(self, remote: RemoteMemory) -> None:
        """End the reports of this connection, and close it when its writes have ended."""
        assert isinstance(remote, NixlConnection)
        if remote.is_disconnected:
            return
        for write in [write for write in self._writes if write.remote is remote]:
            if write.cancel_rest():
                self._report(
                    WriteEnded(write.op, WriteFate.UNKNOWN, "disconnected while in flight")
                )
            else:
                self._end(write, WriteFate.FAILED, "disconnected between two batches")
        remote.is_disconnected = True
        remote.peer.num_connections -= 1
        self._remove_if_unused(remote.peer)

    def _remove_if_unused(self, peer: NixlPeer) -> None:
        if not peer.is_needed:
            del self._peers[peer.name]
            peer.release()
            self._remove_agent(peer.name)

    @_locked
    def close(self) -> None:
        """Shut the agent down. Local memory is not read after that."""
        if self._agent is None:
            return
        for write in self._writes:
            write.release()
        for name, peer in self._peers.items():
            peer.release()
            self._remove_agent(name)
        self._lists.clear()
        for registered in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        self._agent, self._registered, self._ended = None, [], []
        self._peers, self._writes, self._immediate, self._immediate_ended = {}, {}, {}, {}
        self.regions = self._writable = ()


def _make_agent(name: str, setup: TransportSetup) -> Any:
    ucx = setup.resolve_options("nixl", OPTIONS)["ucx"]
    if not ucx and _is_loopback(setup.host):
        ucx = "NET_DEVICES=lo"
    ucx = f"{_LONG_COPIES},{ucx}" if ucx else _LONG_COPIES
    with _translated("NIXL cannot start"):
        module = package.load()
        config = module.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = module.nixl_agent(name, config)
        agent.create_backend("UCX", {"engine_config": ucx})
    return agent


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextmanager
def _translated(problem: str) -> Iterator[None]:
    """Raise NIXL's exceptions as ``TransportError``."""
    try:
        yield
    except Exception as error:
        raise TransportError(
            f"{problem} ({_text(error)}); set NIXL_LOG_LEVEL=DEBUG for details"
        ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
