"""What both endpoints set up alike: memory, staging, transport, lifeline, card."""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvferry.copy.cpu import copy_binding, warm_up
from kvferry.copy.devices import copier_on
from kvferry.errors import InputError
from kvferry.ids import MAX_ID, MAX_NAME, Peer
from kvferry.layout.layout import Layout
from kvferry.plan.choose import PRESETS, Constants
from kvferry.plan.places import Base
from kvferry.protocol.checks import pools_problem
from kvferry.protocol.endpoint import Identity
from kvferry.protocol.messages import Staging
from kvferry.regions import Device, Region
from kvferry.rendezvous.records import Name
from kvferry.runtime.card import Card
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.lifeline import Lifeline
from kvferry.runtime.memory import Memory, PoolArrays
from kvferry.runtime.mover.gauge import PIECE_BYTES, SCRATCH_BYTES, scattered
from kvferry.staging import SlotPool, allocate, slots_for
from kvferry.staging.pool import DEFAULT_SLOT_BYTES
from kvferry.transport.base import Setup, Transport
from kvferry.transport.registry import transport_class

# With its transport's realm, it must fit a frame's text.
MAX_MODEL = 512
# What a slot costs beside its bytes: a gather, a write, a note and a scatter through two
# processes' queues. Seen on 2 shared cores; a transport's own constants are measured.
SLOT_S = 250e-6


def new_incarnation() -> int:
    """A random id for one life of an endpoint."""
    return secrets.randbelow(MAX_ID) + 1


def make_transport(
    name: str, host: str = "127.0.0.1", options: Mapping[str, str] | None = None
) -> Transport:
    """A transport by name. Pools may be allocated from it before an endpoint is made with it."""
    setup = Setup(
        agent=f"kvferry-{secrets.token_hex(8)}",
        copy=copy_binding,
        copies_on=copier_on,
        host=host,
        options=options or {},
    )
    return transport_class(name)(setup)


class Slots(NamedTuple):
    """Staging memory: slots one after another, then scratch memory for measuring."""

    region: Region
    pool: SlotPool
    owner: object

    @property
    def scratch_offset(self) -> int:
        """Where the scratch memory begins."""
        return self.pool.num_bytes

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


class Ground(NamedTuple):
    """Everything an endpoint stands on."""

    member: Member
    memory: Memory
    slots: Slots | None
    transport: Transport
    incarnation: int
    lifeline: Lifeline
    card: Card
    fingerprint: str

    @property
    def identity(self) -> Identity:
        """As its machine shows itself."""
        return Identity(
            self.member.peer,
            self.incarnation,
            self.member.layout,
            self.fingerprint,
            self.card.encode(),
        )

    @property
    def staging_bytes(self) -> int:
        """Memory taken beside the pools."""
        return self.slots.region.num_bytes if self.slots else 0

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the pools' regions."""
        return tuple(region.address for region in self.memory.regions)

    @property
    def staging(self) -> Staging:
        """As a peer is told."""
        if self.slots is None:
            return Staging()
        return Staging(self.slots.pool.slot_bytes, self.slots.pool.num_slots)

    def close(self) -> None:
        """Give everything back, before anybody was told of it."""
        self.transport.close()
        self.lifeline.close()


def lay_ground(
    member: Member,
    pools: Memory | PoolArrays,
    transport: str | Transport,
    config: EndpointConfig,
    *,
    writable: bool,
    most_slots: int,
) -> Ground:
    """Set everything up that has no thread. Raises errors that say what to change."""
    _demand_reachable(config.host)
    _demand_sayable(member)
    layout, rank = member.layout, member.rank
    memory = pools if isinstance(pools, Memory) else Memory.of(layout, rank, pools)
    problem = pools_problem(layout, rank, memory.map)
    if problem:
        raise InputError(problem)
    if isinstance(transport, str):
        transport = make_transport(transport, config.host, config.options)
    try:
        slots = _slots(config, layout, memory, transport, most_slots)
        transport.register([*memory.regions, *([slots.region] if slots else [])], writable=writable)
        if memory.device.is_host:
            warm_up()
        incarnation = new_incarnation()
        lifeline = Lifeline(config.host, incarnation)
    except BaseException:
        transport.close()
        raise
    staging_region = len(memory.regions) if slots else None
    scratch = slots.scratch_offset if slots else 0
    card = Card(transport.name, transport.metadata(), lifeline.address, staging_region, scratch)
    fingerprint = f"{member.model} over {transport.realm}"
    return Ground(member, memory, slots, transport, incarnation, lifeline, card, fingerprint)


def _demand_reachable(host: str) -> None:
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        raise InputError(f"host is a numeric address, not {host!r:.200}") from None
    if unspecified:
        raise InputError(f"host {host} says nothing; name the address that peers reach this by")


def _demand_sayable(member: Member) -> None:
    """What others could not read must not be sent to them."""
    try:
        msgspec.convert(member.name, Name)
    except msgspec.ValidationError:
        raise InputError(
            f"an instance's name has 1 to {MAX_NAME} letters, digits and any of ._:@+/- behind "
            f"the first; {member.name!r:.300} has not"
        ) from None
    if len(member.model) > MAX_MODEL:
        raise InputError(
            f"model has {len(member.model)} characters, and {MAX_MODEL} at most; use a hash"
        )


def _slots(
    config: EndpointConfig,
    layout: Layout,
    memory: Memory,
    transport: Transport,
    most_slots: int,
) -> Slots | None:
    if transport.maps_peer or not config.staging_bytes:
        return None
    unit_bytes = max(group.unit_bytes for group in layout.spec.groups)
    pool = slots_for(
        unit_bytes,
        budget_bytes=config.staging_bytes - SCRATCH_BYTES,
        slot_bytes=config.slot_bytes,
        most_slots=most_slots,
    )
    buffer = allocate(pool.num_bytes + SCRATCH_BYTES, memory.device)
    return Slots(buffer.region, pool, buffer)


def preset_for(transport: str, device: Device) -> str:
    """Whose figures are used before an endpoint has measured its own."""
    where = "host" if device.is_host else "gpu"
    names = (transport, f"{transport}-{where}", f"nixl-{where}")
    return next(name for name in names if name in PRESETS)


def first_constants(config: EndpointConfig, ground: Ground) -> Constants:
    """What a transport is taken to cost until it was measured."""
    if config.constants is not None:
        return config.constants
    transport, device = ground.transport, ground.memory.device
    preset = PRESETS[preset_for(transport.name, device)]
    return replace(
        preset,
        copy_bytes_per_s=copy_speed() if device.is_host else preset.copy_bytes_per_s,
        slot_bytes=ground.slots.pool.slot_bytes if ground.slots else DEFAULT_SLOT_BYTES,
        slot_s=SLOT_S,
        maps_peer=transport.maps_peer,
    )


@cache
def copy_speed() -> float:
    """Bytes a second that the CPU gathers in small pieces, measured once for a process."""
    from_, into = allocate(2 * SCRATCH_BYTES), allocate(2 * SCRATCH_BYTES)
    pieces = scattered(Base(0, 0, 0), Base(0, 0, 0), SCRATCH_BYTES // PIECE_BYTES)
    addresses = (from_.region.address,), (into.region.address,)
    copy_binding(pieces, *addresses)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        copy_binding(pieces, *addresses)
        seconds.append(time.perf_counter() - begin)
    return SCRATCH_BYTES / min(seconds)
