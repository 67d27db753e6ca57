"""Set-up of what an endpoint needs before it starts threads: memory, transports, sockets."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.discovery.records import demand_name
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.liveness.port import LivenessPort
from kvferry.endpoint.peer_metadata import PeerMetadata
from kvferry.errors import InputError, TransportError
from kvferry.ids import MAX_ID, Peer
from kvferry.layout.layout import Layout
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.copy.devices import copier_on
from kvferry.memory.pools import Memory, PoolArrays, arrays_of
from kvferry.memory.staging import SlotPool, allocate, slots_for
from kvferry.memory.warm import warm_up
from kvferry.plan.cost import slots_on
from kvferry.protocol.checks import pools_problem
from kvferry.protocol.links import Identity
from kvferry.protocol.messages import MAX_SLOTS, Staging
from kvferry.regions import Region
from kvferry.transports.base import Transport, TransportSetup
from kvferry.transports.registry import load, transport_class
from kvferry.transports.transport_set import AUTO, TransportSet, transport_names

# A longer text does not fit the handshake.
MAX_MODEL = 512
# Scratch memory that peers write to measure their link.
SCRATCH_BYTES = 1 << 20
# Large enough that a GPU's transfer time differs measurably from that of a smaller write.
GPU_SCRATCH_BYTES = 4 << 20


def new_incarnation() -> int:
    """Return a random incarnation id."""
    return secrets.randbelow(MAX_ID) + 1


def make_transport(
    name: str, host: str = "127.0.0.1", options: Mapping[str, str] | None = None
) -> Transport:
    """Return a transport by name. Pools may be allocated from it before it goes to an endpoint.

    ``host``: numeric address that peers reach this process at. ``options``: the transport's own.
    Raises ``TransportError`` if the transport is unknown or does not work here.
    """
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
    """Return transports: all that work here (``auto``), or those named, separated by commas.

    Pools may be allocated from them before they go to an endpoint. Each option goes to the
    transports that have it. Raises ``TransportError`` if no transport works here, a named one does
    not, or none has an option.
    """
    given = dict(options or {})
    names = transport_names(name)
    if len(names) == 1:
        return TransportSet.make(name, lambda each: make_transport(each, host, given))
    known = {each: _options_of(each) for each in names}
    unknown = sorted(set(given).difference(*known.values()))
    if unknown:
        raise TransportError(f"none of {', '.join(names)} has an option {unknown[0]!r:.80}")

    def make(each: str) -> Transport:
        if name == AUTO:
            _check_loopback(each, host)
        own = {key: value for key, value in given.items() if key in known[each]}
        return make_transport(each, host, own)

    return TransportSet.make(name, make)


def _check_loopback(name: str, host: str) -> None:
    """Refuse a transport that listens on all addresses if the endpoint's host is loopback."""
    if load(name).listens_on_all_addresses and ipaddress.ip_address(host).is_loopback:
        raise TransportError(
            f"{name} listens on every address, but this endpoint's host is {host}; name the "
            f"transport, or set another host, to use it"
        )


def _options_of(name: str) -> tuple[str, ...]:
    try:
        return load(name).option_names
    except TransportError:
        return ()  # Making the transport reports the problem.


class StagingMemory(NamedTuple):
    """Staging memory: consecutive slots, then scratch memory for measuring links."""

    region: Region
    pool: SlotPool
    owner: object

    @property
    def scratch_offset(self) -> int:
        """Offset of the scratch memory."""
        return self.pool.num_bytes

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch memory."""
        return self.region.num_bytes - self.pool.num_bytes

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self.region.address + self.pool.offset(slot)


class EndpointSetup(NamedTuple):
    """Parts of an endpoint that need no thread."""

    identity: Identity
    memory: Memory
    slots: StagingMemory | None
    transports: TransportSet
    liveness_port: LivenessPort
    # Base addresses of the pools' regions. Copiers recognize this object, so share it.
    addresses: tuple[int, ...]

    @property
    def me(self) -> Peer:
        """The endpoint's id in the cluster."""
        return self.identity.peer

    @property
    def staging_bytes(self) -> int:
        """Size of all staging slots together."""
        return self.slots.pool.num_bytes if self.slots else 0

    @property
    def staging(self) -> Staging:
        """Size and number of slots, for the handshake."""
        if self.slots is None:
            return Staging()
        return Staging(self.slots.pool.slot_bytes, self.slots.pool.num_slots)

    def close(self) -> None:
        """Close everything, if the endpoint does not start."""
        self.transports.close()
        self.liveness_port.close()


def set_up(
    identity: Identity,
    pools: Memory | PoolArrays,
    transport: str | Transport | TransportSet,
    config: EndpointConfig,
    *,
    writable: bool,
    listener: UnixListener | None = None,
) -> EndpointSetup:
    """Set up an endpoint, and complete its identity with what the handshake sends.

    If it raises, nothing is left open.
    """
    _check_host(config.host)
    _check_identity(identity)
    if isinstance(transport, str):
        transports = make_transports(transport, config.host, config.options)
    else:
        transports = TransportSet.of(transport) if isinstance(transport, Transport) else transport
    try:
        memory = _memory(identity, pools, transports, writable=writable)
        slots = _slots(config, identity.layout, memory, transports, writable=writable)
        transports.register(memory.regions, slots.region if slots else None, writable=writable)
        offers = transports.offers(writable=writable)
        if memory.device.is_host:
            warm_up()
        liveness_port = LivenessPort(config.host, identity.incarnation)
    except BaseException:
        transports.close()
        raise
    if slots and not transports.stages:
        slots = None  # The transports that stage could not register the pools.
    staging_region = len(memory.regions) if slots else None
    scratch = (slots.scratch_offset, slots.scratch_bytes) if slots else (0, 0)
    metadata = PeerMetadata(liveness_port.address, staging_region, *scratch, listener)
    identity = replace(identity, metadata=metadata.encode(), transports=offers)
    addresses = tuple(region.address for region in memory.regions)
    return EndpointSetup(identity, memory, slots, transports, liveness_port, addresses)


def _memory(
    identity: Identity, pools: Memory | PoolArrays, transports: TransportSet, *, writable: bool
) -> Memory:
    """Return this rank's memory. A transport may move arrays into memory that peers can write."""
    layout, rank = identity.layout, identity.peer.rank
    if isinstance(pools, Memory):
        memory = pools
    else:
        if writable:
            Memory.of(layout, rank, pools)  # Refuse pools that do not fit before moving them.
            transports.adopt([*arrays_of(pools)])
        memory = Memory.of(layout, rank, pools)
    problem = pools_problem(layout, rank, memory.map)
    if problem:
        raise InputError(problem)
    return memory


def _check_host(host: str) -> None:
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        raise InputError(f"host must be a numeric address, not {host!r:.200}") from None
    if unspecified:
        raise InputError(
            f"host {host} is no address of one machine; use the one that peers reach this by"
        )


def _check_identity(identity: Identity) -> None:
    """Refuse what does not fit the handshake."""
    demand_name(identity.peer.instance)
    if len(identity.fingerprint) > MAX_MODEL:
        raise InputError(
            f"model must have at most {MAX_MODEL} characters, not {len(identity.fingerprint)}; "
            f"use a hash"
        )


def _slots(
    config: EndpointConfig,
    layout: Layout,
    memory: Memory,
    transports: TransportSet,
    *,
    writable: bool,
) -> StagingMemory | None:
    if not transports.stages or config.staging_bytes == 0:
        return None
    unit_bytes = max(group.unit_bytes for group in layout.spec.groups)
    pool = slots_for(
        unit_bytes,
        budget_bytes=config.staging_bytes,
        slot_bytes=config.slot_bytes,
        rule=slots_on(memory.device),
        # A GPU gathers all waiting slots in one launch and needs no core for their writes, so a
        # source may have as many slots as a target.
        most_slots=(
            config.protocol.local_slots if memory.device.is_host and not writable else MAX_SLOTS
        ),
    )
    scratch_bytes = SCRATCH_BYTES if memory.device.is_host else GPU_SCRATCH_BYTES
    # Scratch memory is extra: taken from the budget, it would leave less than a power of two.
    buffer = allocate(pool.num_bytes + scratch_bytes, memory.device)
    return StagingMemory(buffer.region, pool, buffer)
