"""What both endpoints set up alike: memory, staging, transports, liveness_port, metadata."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.discovery.records import demand_name
from kvferry.endpoint.calibration import scratch_bytes
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.liveness.port import LivenessPort
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.errors import InputError, TransportError
from kvferry.ids import MAX_ID, Peer
from kvferry.layout.layout import Layout
from kvferry.memory.copy.cpu import copy_binding, warm_up
from kvferry.memory.copy.devices import copier_on
from kvferry.memory.pools import Memory, PoolArrays, arrays_of
from kvferry.memory.staging import SlotPool, allocate, slots_for
from kvferry.plan.cost import slots_on
from kvferry.protocol.checks import pools_problem
from kvferry.protocol.links import Identity
from kvferry.protocol.messages import MAX_SLOTS, Staging, TransportOffers
from kvferry.regions import Region
from kvferry.transports.base import Transport, TransportSetup
from kvferry.transports.registry import load, transport_class
from kvferry.transports.transport_set import AUTO, TransportSet, transport_names

# It must fit a frame's text.
MAX_MODEL = 512


def new_incarnation() -> int:
    """A random id for one life of an endpoint."""
    return secrets.randbelow(MAX_ID) + 1


def make_transport(
    name: str, host: str = "127.0.0.1", options: Mapping[str, str] | None = None
) -> Transport:
    """A transport by name. Pools may be allocated from it before an endpoint is made with it."""
    setup = TransportSetup(
        agent=f"kvferry-{secrets.token_hex(8)}",
        copy=copy_binding,
        copies_on=copier_on,
        host=host,
        options=options or {},
    )
    return transport_class(name)(setup)


def make_transports(
    name: str = "auto", host: str = "127.0.0.1", options: Mapping[str, str] | None = None
) -> TransportSet:
    """Transports: all that work here (``auto``), one, or several with commas between them.

    Pools may be allocated from them before an endpoint is made. An option goes to whoever knows it.
    """
    given = dict(options or {})
    names = transport_names(name)
    if len(names) == 1:
        return TransportSet.make(name, lambda each: make_transport(each, host, given))
    known = {each: _options_of(each) for each in names}
    strange = sorted(set(given).difference(*known.values()))
    if strange:
        raise TransportError(f"none of {', '.join(names)} has an option {strange[0]!r:.80}")

    def make(each: str) -> Transport:
        if name == AUTO:
            _demand_confined(each, host)
        theirs = {key: value for key, value in given.items() if key in known[each]}
        return make_transport(each, host, theirs)

    return TransportSet.make(name, make)


def _demand_confined(name: str, host: str) -> None:
    """Nobody who asked for loopback, and for no transport, gets a port that is open to all."""
    if load(name).listens_on_all_addresses and ipaddress.ip_address(host).is_loopback:
        raise TransportError(
            f"{name} listens on every address, and this endpoint's host is {host}; name it, or "
            f"another host, to have it"
        )


def _options_of(name: str) -> tuple[str, ...]:
    try:
        return load(name).option_names
    except TransportError:
        return ()  # Making it will tell.


class StagingMemory(NamedTuple):
    """Staging memory: slots one after another, then scratch memory for measuring."""

    region: Region
    pool: SlotPool
    owner: object

    @property
    def scratch_offset(self) -> int:
        """Where the scratch memory begins."""
        return self.pool.num_bytes

    @property
    def scratch_bytes(self) -> int:
        """How large it is."""
        return self.region.num_bytes - self.pool.num_bytes

    def address(self, slot: int) -> int:
        """Of a slot."""
        return self.region.address + self.pool.offset(slot)


class Member(NamedTuple):
    """Which rank of which instance an endpoint is, and of which model."""

    name: str
    rank: int
    layout: Layout
    model: str

    @property
    def peer(self) -> Peer:
        """As others call it."""
        return Peer(self.name, self.rank)


class EndpointSetup(NamedTuple):
    """Everything an endpoint stands on."""

    member: Member
    memory: Memory
    slots: StagingMemory | None
    transports: TransportSet
    offers: TransportOffers
    incarnation: int
    liveness_port: LivenessPort
    metadata: PeerMetadata
    # Of the pools' regions. One object for all copies: whoever has seen it knows it again.
    addresses: tuple[int, ...]

    @property
    def identity(self) -> Identity:
        """As its machine shows itself."""
        return Identity(
            self.member.peer,
            self.incarnation,
            self.member.layout,
            self.member.model,
            self.metadata.encode(),
            self.offers,
        )

    @property
    def staging_bytes(self) -> int:
        """What the slots take."""
        return self.slots.pool.num_bytes if self.slots else 0

    @property
    def staging(self) -> Staging:
        """As a peer is told."""
        if self.slots is None:
            return Staging()
        return Staging(self.slots.pool.slot_bytes, self.slots.pool.num_slots)

    def close(self) -> None:
        """Give everything back, before anybody was told of it."""
        self.transports.close()
        self.liveness_port.close()


def set_up(
    member: Member,
    pools: Memory | PoolArrays,
    transport: str | Transport | TransportSet,
    config: EndpointConfig,
    *,
    writable: bool,
    most_slots: int,
    listener: UnixListener | None = None,
) -> EndpointSetup:
    """Set everything up that has no thread. Raises errors that say what to change."""
    _demand_reachable(config.host)
    _demand_sayable(member)
    transports = _several(transport, config)
    try:
        memory = _memory(member, pools, transports, writable=writable)
        slots = _slots(config, member.layout, memory, transports, most_slots)
        transports.register(memory.regions, slots.region if slots else None, writable=writable)
        offers = transports.offers(writable=writable)
        if memory.device.is_host:
            warm_up()
        incarnation = new_incarnation()
        liveness_port = LivenessPort(config.host, incarnation)
    except BaseException:
        transports.close()
        raise
    if slots and not transports.stages:
        slots = None  # Whoever would have staged could not take the pools.
    staging_region = len(memory.regions) if slots else None
    scratch = (slots.scratch_offset, slots.scratch_bytes) if slots else (0, 0)
    metadata = PeerMetadata(liveness_port.address, staging_region, *scratch, listener)
    return EndpointSetup(
        member,
        memory,
        slots,
        transports,
        offers,
        incarnation,
        liveness_port,
        metadata,
        addresses=tuple(region.address for region in memory.regions),
    )


def _several(transport: str | Transport | TransportSet, config: EndpointConfig) -> TransportSet:
    if isinstance(transport, str):
        return make_transports(transport, config.host, config.options)
    return TransportSet.of(transport) if isinstance(transport, Transport) else transport


def _memory(
    member: Member, pools: Memory | PoolArrays, transports: TransportSet, *, writable: bool
) -> Memory:
    """This rank's memory, looked at only when it lies where it will stay."""
    layout, rank = member.layout, member.rank
    if isinstance(pools, Memory):
        memory = pools
    else:
        if writable:
            Memory.of(layout, rank, pools)  # What does not fit is refused before it is moved.
            transports.adopt([*arrays_of(pools)])
        memory = Memory.of(layout, rank, pools)
    problem = pools_problem(layout, rank, memory.map)
    if problem:
        raise InputError(problem)
    return memory


def _demand_reachable(host: str) -> None:
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        raise InputError(f"host is a resolve_ip address, not {host!r:.200}") from None
    if unspecified:
        raise InputError(f"host {host} says nothing; name the address that peers reach this by")


def _demand_sayable(member: Member) -> None:
    """What others could not read must not be sent to them."""
    demand_name(member.name)
    if len(member.model) > MAX_MODEL:
        raise InputError(
            f"model has {len(member.model)} characters, and {MAX_MODEL} at most; use a hash"
        )


def _slots(
    config: EndpointConfig,
    layout: Layout,
    memory: Memory,
    transports: TransportSet,
    most_slots: int,
) -> StagingMemory | None:
    if not transports.stages or not config.staging_bytes:
        return None
    unit_bytes = max(group.unit_bytes for group in layout.spec.groups)
    pool = slots_for(
        unit_bytes,
        budget_bytes=config.staging_bytes,
        slot_bytes=config.slot_bytes,
        rule=slots_on(memory.device),
        # A GPU gathers all slots that wait in one launch and needs no core for their writes, so
        # a source has as many there as a target.
        most_slots=most_slots if memory.device.is_host else MAX_SLOTS,
    )
    # Beside the slots, which would hold less than a power of two of what comes in powers of two.
    buffer = allocate(pool.num_bytes + scratch_bytes(memory.device), memory.device)
    return StagingMemory(buffer.region, pool, buffer)
