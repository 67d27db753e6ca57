"""NIXL: RDMA, GPUs and, between processes of one host, one copy by the kernel.

``poll`` drives everything, over some networks also what peers write into our memory;
NIXL's own progress thread is off, because it takes a whole core. Descriptors are handed
over as our own merged arrays: preparing lists first costs twice as much and merges nothing
more.

Writes have no notifications: a write with one ends only once the target has polled, twice,
also where the kernel has copied its bytes before ``transfer`` returns (ADR 15).

NIXL can't cancel. A write that a stopped peer holds up stays under way for as long as
that takes; after ``disconnect`` it is watched in silence, because the connection may
go only when nothing of it is under way.

An error after a batch was submitted means that the connection has broken. Our memory is
read no more, but the peer may still take bytes that were on their way, from the buffers
of its own host, however late it gets to them. So the fate of that write is UNKNOWN, as
long as the peer's process may live. Every later write is refused until the peer has been
disconnected and connected again, for NIXL does not mend connections.

UCX listens on the network, and whoever reaches it can write. With a loopback ``host``
it is confined to the loopback device, unless the option ``ucx`` or ``UCX_NET_DEVICES``
says otherwise; beyond that the network must be one that is trusted.
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
from kvferry.transports import bounds, options
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.nixl import package
from kvferry.transports.nixl.batches import (
    DescriptorBatch,
    NixlMemory,
    batch_of,
    batches,
    few_pieces,
    kind,
)
from kvferry.transports.nixl.peers import NixlConnection, NixlMetadata, NixlPeer, decode, encode
from kvferry.transports.nixl.writes import NixlWrite
from kvferry.transports.single_descriptor import single

# ``ucx``: UCX's settings without their prefix, as in "TLS=tcp,NET_DEVICES=eth0". Variables
# of the environment (UCX_TLS and so on) come before them.
OPTIONS = {"ucx": ""}

# A notification that makes the connection, and says nothing.
_GREETING = b"g"
# Between processes of one host the kernel copies. Asked for half a megabyte at a time, as UCX
# does by itself, it takes half as long again.
_LONG_COPIES = "CMA_SEG_SIZE=16m"
# How long one ``poll`` may go on submitting batches.
_POLL_S = 0.005


# How long a write that is made at once is looked after before that is left to ``poll``.
_AT_ONCE_S = 30e-6
# How long such a write waits for another thread's: handing it over would take longer, and the
# next one would find the agent in use again.
_TURN_S = 50e-6


P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(method: Callable[Concatenate[NixlTransport, P], R]) -> Callable[..., R]:
    """NIXL has no locks of its own here, and a small write may come from another thread."""

    @wraps(method)
    def locked(self: NixlTransport, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            return method(self, *args, **kwargs)

    return locked


class NixlTransport(Transport):
    """One NIXL agent, which one thread at a time may use."""

    name: ClassVar[str] = "nixl"
    option_names: ClassVar[tuple[str, ...]] = tuple(OPTIONS)
    needs_polling: ClassVar[bool] = True
    writes_at_once: ClassVar[bool] = True

    def __init__(self, setup: TransportSetup) -> None:
        super().__init__(setup)
        # NIXL keeps peers by name, so one that comes back must have another.
        self._name = f"{setup.agent}.{secrets.token_hex(4)}"
        self._agent: Any = _agent(self._name, setup)
        self._turn = threading.Lock()
        self._memory = NixlMemory(())
        self._registered: list[Any] = []
        self._public: tuple[Region, ...] = ()
        self._peers: dict[str, NixlPeer] = {}
        self._writes: dict[NixlWrite, None] = {}
        self._ended: list[WriteEnded] = []
        # Writes that were made at once and go on, and how they ended once they have.
        self._asked_for: dict[Op, NixlWrite] = {}
        self._told: dict[Op, WriteEnded] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Whether NIXL can be loaded."""
        return package.missing()

    # ------------------------------------------------------------ memory and peers

    @_in_turn
    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Take memory of the host and of GPUs."""
        for name in ("DRAM", "VRAM"):
            alike = [at for at in regions if at.num_bytes and kind(at.device) == name]
            rows = [(at.address, at.num_bytes, at.device.number, "") for at in alike]
            if rows:
                with _translated(f"NIXL can't use {len(rows)} regions of {name} memory"):
                    self._registered.append(self._agent.register_memory(rows, name))
        self.regions = tuple(regions)
        self._memory = NixlMemory(regions)
        self._public = self.regions if writable else ()

    @_in_turn
    def metadata(self) -> bytes:
        """How to reach the agent, and its regions if peers may write them."""
        with _translated("NIXL has no metadata for its peers"):
            if self._public:
                agent = self._agent.get_agent_metadata()
            else:
                nothing = self._agent.get_reg_descs([(0, 0, 0, "")], "DRAM")
                nothing.clear()
                agent = self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        return encode(self._name, agent, self._public)

    @_in_turn
    def connect(self, metadata: bytes) -> RemoteMemory:
        """Get to know a peer's agent. The connection itself is made in the background."""
        theirs = decode(metadata)
        peer = self._peers.get(theirs.name) or self._met(theirs)
        if peer.is_broken:
            raise TransportError(
                f"the connection to {peer.name} broke and is being given up; connect again"
            )
        peer.num_remotes += 1
        return NixlConnection(peer)

    def _met(self, theirs: NixlMetadata) -> NixlPeer:
        with _translated(f"NIXL can't reach {theirs.name}"):
            name = self._agent.add_remote_agent(theirs.agent).decode()
        if name != theirs.name:
            if name not in self._peers:
                self._forget(name)
            raise TransportError(f"the peer's nixl metadata is of {name}, not of {theirs.name}")
        # Getting connected takes tens of milliseconds that the first write need not wait
        # for. If this fails, the first write does too, and tells.
        with suppress(Exception):
            self._agent.send_notif(name, _GREETING)
        peer = self._peers[name] = NixlPeer(theirs)
        return peer

    def _forget(self, name: str) -> None:
        with suppress(Exception):  # NIXL may have forgotten the peer by itself.
            self._agent.remove_remote_agent(name)

    # ------------------------------------------------------------ writes

    @_in_turn
    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Submit the first batch. Between processes of one host, that is its copy."""
        self._begin(remote, op, pieces)

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Submit, and look after it for a moment, unless the agent is in use for long."""
        if not self._turn.acquire(timeout=_TURN_S):
            return WriteEnded(op, WriteFate.BUSY, "the agent is in use")
        try:
            write = self._begin(remote, op, pieces)
            enough = time.monotonic() + _AT_ONCE_S
            while write in self._writes and time.monotonic() < enough:
                self._step(write)
            if write is None or write not in self._writes:
                return self._ended.pop()
            self._asked_for[op] = write
            return None
        finally:
            self._turn.release()

    def look(self, op: Op) -> WriteEnded | None:
        """Move a write on, unless the agent is in use, and it with all others."""
        if op not in self._told and self._turn.acquire(blocking=False):
            try:
                write = self._asked_for.get(op)
                if write is not None:
                    self._step(write)
            finally:
                self._turn.release()
        return self._told.pop(op, None)

    def _begin(self, remote: RemoteMemory, op: Op, pieces: Binding) -> NixlWrite | None:
        """Begin a write; None if it has failed, which is in ``_ended`` then."""
        assert isinstance(remote, NixlConnection)
        assert not remote.is_left, "a write comes before disconnect"
        todo = self._batches(remote.peer, pieces)
        if isinstance(todo, str):
            self._ended.append(WriteEnded(op, WriteFate.FAILED, todo))
            return None
        write = NixlWrite(remote, op, todo)
        remote.peer.num_writes += 1
        self._writes[write] = None
        self._step(write)
        return write

    def _batches(self, peer: NixlPeer, pieces: Binding) -> list[DescriptorBatch] | str:
        """What to hand to NIXL, or why nothing can be."""
        if peer.is_broken:
            return f"the connection to {peer.name} is broken"
        ours, theirs = self._memory, peer.memory
        only = single(pieces)
        if only and only.length and only.fits(ours.sizes, theirs.sizes):
            return [batch_of(only, ours, theirs)]
        outside = bounds.problem(pieces, ours.limits, theirs.limits)
        return outside or few_pieces(pieces, ours, theirs) or batches(pieces, ours, theirs)

    @_in_turn
    def poll(self) -> list[WriteEnded]:
        """Move everything on, for a few milliseconds at most."""
        if self._agent is None:
            return []
        self._let_arrive()
        enough = time.monotonic() + _POLL_S
        moving = list(self._writes)
        while moving:
            moving = [write for write in moving if self._step(write)]
            if time.monotonic() >= enough:
                break
        ended, self._ended = self._ended, []
        return ended

    def _let_arrive(self) -> None:
        """Move peers' writes into our memory on. Greetings come out of this, and are dropped."""
        with suppress(Exception):  # Some peer's trouble; its writes will tell.
            self._agent.get_new_notifs()

    def _step(self, write: NixlWrite) -> bool:
        """Move a write on; whether it has more to do at once."""
        try:
            write.make(self._agent)
        except Exception as error:  # Nothing of it is under way, so this is the end.
            self._end(write, WriteFate.FAILED, _text(error))
            return False
        try:
            if not write.go_on(self._agent):
                return False
        except Exception as error:
            write.remote.peer.is_broken = True
            self._end(write, WriteFate.UNKNOWN, _text(error))
            return False
        if not write.has_more:
            self._end(write, None)
        return write.has_more

    def _end(self, write: NixlWrite, fate: WriteFate | None, detail: str = "") -> None:
        if not write.remote.is_left:
            self._tell(WriteEnded(write.op, fate, detail))
        del self._writes[write]
        write.release()
        write.remote.peer.num_writes -= 1
        self._retire(write.remote.peer)

    def _tell(self, ended: WriteEnded) -> None:
        """Whoever made the write at once, or whoever polls."""
        if self._asked_for.pop(ended.op, None) is None:
            self._ended.append(ended)
        else:
            self._told[ended.op] = ended

    # ------------------------------------------------------------ the end

    @_in_turn
    def disconnect(self, remote: RemoteMemory) -> None:
        """Say no more of its writes, and let the connection go once they are over."""
        assert isinstance(remote, NixlConnection)
        if remote.is_left:
            return
        for write in [write for write in self._writes if write.remote is remote]:
            if write.give_up():
                self._tell(WriteEnded(write.op, WriteFate.UNKNOWN, "disconnected while under way"))
            else:
                self._end(write, WriteFate.FAILED, "disconnected between two batches")
        remote.is_left = True
        remote.peer.num_remotes -= 1
        self._retire(remote.peer)

    def _retire(self, peer: NixlPeer) -> None:
        if not peer.is_needed:
            del self._peers[peer.name]
            peer.handles.clear()
            self._forget(peer.name)

    @_in_turn
    def close(self) -> None:
        """End the agent. Nothing reads our memory after that."""
        if self._agent is None:
            return
        for write in self._writes:
            write.release()
        for name, peer in self._peers.items():
            peer.handles.clear()
            self._forget(name)
        for registered in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        self._agent, self._registered, self._ended = None, [], []
        self._peers, self._writes, self._asked_for, self._told = {}, {}, {}, {}
        self.regions = self._public = ()


def _agent(name: str, setup: TransportSetup) -> Any:
    ucx = options.chosen("nixl", setup, OPTIONS)["ucx"]
    if not ucx and _is_loopback(setup.host):
        ucx = "NET_DEVICES=lo"
    ucx = f"{_LONG_COPIES},{ucx}" if ucx else _LONG_COPIES
    with _translated("NIXL can't be started"):
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
def _translated(what: str) -> Iterator[None]:
    """Foreign exceptions end here."""
    try:
        yield
    except Exception as error:
        raise TransportError(f"{what} ({_text(error)}); NIXL_LOG_LEVEL=DEBUG tells more") from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
