"""A model that is explored: one room from one source rank to two target ranks, and its faults.

The times are chosen so that a path is short and every timer still matters: a
loss is repaired well before the deadline, and the deadline comes before silence
does, so that each of them is seen to end a room on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.endpoint.runner.runner import (
    MachineRunner,
    SourcePorts,
    SourceRunner,
    TargetPorts,
    TargetRunner,
)
from kvferry.endpoint.runner.sessions import Sessions
from kvferry.ids import Peer
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout, Parallel
from kvferry.layout.spec import CacheSpec, DType, Group, Paged, StateRow, Tensor, attention
from kvferry.plan.places import contiguous_pools
from kvferry.plan.plan import Request
from kvferry.protocol.events import (
    Event,
    Finish,
    Instance,
    Open,
    Prepare,
    Push,
    Receive,
    ReceiveRequest,
)
from kvferry.protocol.links import Identity
from kvferry.protocol.messages import PageTableMessage, Staging
from kvferry.protocol.source import SourceMachine, SourceParts
from kvferry.protocol.target import TargetMachine, TargetParts
from kvferry.testing.sim.wire import TRANSPORTS

ROOM = "room"
METADATA = b"first token"
DIGEST = b"the prompt"
FINGERPRINT = "model"
SOURCE = 0
TARGETS = (1, 2)
PEERS = (Peer("prefill", 0), Peer("decode", 0), Peer("decode", 1))
INCARNATIONS = (100, 101, 102)

NO_STAGING = Staging()
TIMES = ProtocolConfig(
    resend_s=2.0,
    status_poll_s=3.0,
    credit_patience_s=3.0,
    heartbeat_s=5.0,
    silence_s=10.0,
    handshake_s=8.0,
    unclaimed_offer_ttl_s=12.0,
    local_slots=1,
)


class ModelFault(StrEnum):
    """What may go wrong. A path has at most ``ExploredModel.max_faults`` of them."""

    DROP = "a frame is lost"
    DROP_NOTE = "an arrival note is lost"
    DUPLICATE = "a frame or note comes twice"
    DELAY = "a frame or note comes at any later time, or never"
    BUSY = "the transport is full: a write was never submitted"
    FAILED = "a write ends without success"
    UNKNOWN = "the fate of a write is unknown; it may land until the connection is cut"
    STALL = "a write takes long; time goes on meanwhile"
    CUT = "the connection between the source and a target is cut, and both are told"
    CANCEL_SOURCE = "the source's engine gives the room up"
    CANCEL_TARGET = "a target's engine gives the room up"
    KILL_SOURCE = "the source dies; what it had submitted may still land"
    KILL_TARGET = "a target dies"
    ABSENT = "an engine does nothing more for the room"
    TICK = "one endpoint's clock runs ahead to its next timer"
    DEADLINE = "one endpoint's clock runs ahead to the room's deadline"
    SILENCE = "one endpoint's clock runs ahead by silence_s"


# After one of these everybody must still be Done: they are what repetition is for.
REPAIRED = frozenset(
    {
        ModelFault.DROP,
        ModelFault.DROP_NOTE,
        ModelFault.DUPLICATE,
        ModelFault.DELAY,
        ModelFault.BUSY,
        ModelFault.TICK,
    }
)


@dataclass(frozen=True, kw_only=True)
class ExploredModel:
    """One configuration. ``in_order`` gives each direction of a link FIFO delivery.

    A ``heedless`` source engine goes on pushing after it was told of the end, as
    one does whose call crosses the report. With ``prepares`` it asks for credits
    before it pushes. With ``by_layers`` each push goes layer by layer, the last one first.
    ``faults_at`` says which endpoints faults may touch. The two targets differ in
    nothing but their names, which no machine compares, so faults at the source
    and at one target are all faults up to swapping the targets.
    ``source``, ``target``, their parts, ``source_runner`` and ``sessions`` are classes, so that
    a test can put a broken one in, and ``ports`` may change what a port does. With ``staged``
    everything goes through slots. ``wanted`` is the digest that the targets' engines give; if it is
    another than the source's, nobody may ever be Done. ``horizon_s`` is when a path that
    has not ended is a hang.
    """

    name: str
    spec: CacheSpec
    num_tokens: int = 1
    prefix: int = 0
    wanted: bytes = DIGEST
    prepares: bool = False
    heedless: bool = False
    pushes: tuple[tuple[int, int], ...] = ((0, 1),)
    by_layers: bool = False
    staging: Staging = NO_STAGING
    staged: bool = False
    times: ProtocolConfig = TIMES
    deadline_s: float = 7.0
    horizon_s: float = 60.0
    in_order: bool = False
    max_faults: int = 1
    faults_at: frozenset[int] = frozenset({SOURCE, *TARGETS})
    source: type[SourceMachine] = field(default=SourceMachine)
    target: type[TargetMachine] = field(default=TargetMachine)
    source_parts: SourceParts = field(default_factory=SourceParts)
    target_parts: TargetParts = field(default_factory=TargetParts)
    source_runner: type[SourceRunner] = field(default=SourceRunner)
    sessions: type[Sessions] = Sessions
    ports: Callable[[Any], Any] = lambda ports: ports

    @property
    def is_mixed_up(self) -> bool:
        """Whether the two sides mean different requests."""
        return self.wanted != DIGEST

    @property
    def request(self) -> Request:
        """The request that travels."""
        return Request(self.num_tokens, self.prefix)

    def layouts(self) -> tuple[Layout, Layout]:
        """The two sides: TP1 and TP2."""
        return (
            Layout(self.spec, Parallel(tp=1), page_tokens=1),
            Layout(self.spec, Parallel(tp=2), page_tokens=1),
        )

    def runners(self, world: Any) -> tuple[MachineRunner[Any, Any], ...]:
        """The source and its two targets, before anything has happened; ``world`` is every port."""
        source, *targets = self.machines()
        its = self.ports(SourcePorts(world, world, world, world))
        theirs = self.ports(TargetPorts(world, world, world, world))
        return (
            self.source_runner(source, its, self.sessions(exposed=False)),
            *(TargetRunner(target, theirs, self.sessions(exposed=True)) for target in targets),
        )

    def machines(self) -> tuple[Any, ...]:
        """What they drive."""
        prefill, decode = self.layouts()
        me = Identity(PEERS[SOURCE], INCARNATIONS[SOURCE], prefill, FINGERPRINT, b"", TRANSPORTS)
        source = self.source(me, self.times, self.source_parts)
        targets = (
            self.target(
                Identity(PEERS[i], INCARNATIONS[i], decode, FINGERPRINT, b"", TRANSPORTS),
                self.times,
                contiguous_pools(decode, PEERS[i].rank, self.num_tokens).map,
                self.staging,
                self.target_parts,
            )
            for i in TARGETS
        )
        return (source, *targets)

    def scripts(self) -> tuple[tuple[Event, ...], ...]:
        """What each engine does, in its own order; engines interleave freely."""
        source = (
            Open(ROOM, self.deadline_s),
            *(Prepare(ROOM, Span(first, end)) for first, end in self.pushes if self.prepares),
            *(Push(ROOM, Span(*tokens), cut) for tokens in self.pushes for cut in self._cuts()),
            Finish(ROOM, self.num_tokens, METADATA, DIGEST),
        )
        prefill, _ = self.layouts()
        instance = Instance(PEERS[SOURCE].instance, FINGERPRINT, prefill)
        wanted = self.request, self._tables(), self.deadline_s, self.wanted
        receive = Receive(instance, ReceiveRequest(ROOM, *wanted))
        return (source, *((receive,) for _ in TARGETS))

    def _cuts(self) -> list[Span | None]:
        if not self.by_layers:
            return [None]
        return [Span(layer, layer + 1) for layer in reversed(range(self.spec.num_layers))]

    def _tables(self) -> tuple[PageTableMessage, ...]:
        return tuple(
            PageTableMessage(
                group.name, tuple(range(1 if isinstance(group.kind, StateRow) else self.num_tokens))
            )
            for group in self.spec.groups
        )


def _with_state() -> CacheSpec:
    """A paged group and a slot group, one layer each."""
    paged = attention(layers=2, kv_heads=2, head_dim=1).groups[0]
    kv = Group(paged.name, Paged(), (0,), paged.units, paged.tensors)
    state = Group("state", StateRow(), (1,), 2, (Tensor("ssm", DType.FLOAT32, 1),))
    return CacheSpec(num_layers=2, groups=(kv, state))


_KV = attention(layers=1, kv_heads=2, head_dim=1)
_TOKEN_BYTES = _KV.groups[0].unit_bytes

# One write to each target, straight into its pages.
DIRECT = ExploredModel(name="direct", spec=_KV)
# Two pushes, so that writes of one outbound overlap and overtake.
CHUNKED = ExploredModel(name="chunked", spec=_KV, num_tokens=2, pushes=((0, 1), (1, 2)))
# Two parcels for each target through its single slot, and one local slot for both.
STAGED = ExploredModel(
    name="staged",
    spec=_KV,
    num_tokens=2,
    pushes=((0, 2),),
    staging=Staging(_TOKEN_BYTES, 1),
    staged=True,
)
# Pages as they are pushed, a state row at the end.
STATE = ExploredModel(name="state", spec=_with_state())
# The same, with credits asked for before the push.
PREPARED = replace(STAGED, name="prepared", prepares=True)
# Two layers of one chunk that are pushed apart, the upper one first.
LAYERED = ExploredModel(
    name="layered", spec=attention(layers=2, kv_heads=2, head_dim=1), by_layers=True
)
# The second parcel for each target is gathered while its slot is still in use.
AHEAD = replace(
    STAGED, name="ahead", times=msgspec.structs.replace(TIMES, local_slots=2, early_gather_slots=1)
)
# Both targets' parcels are gathered into the only slot, and taken out of it for who has a credit.
ONLY_SLOT = replace(
    STAGED,
    name="only-slot",
    times=msgspec.structs.replace(TIMES, local_slots=1, early_gather_slots=1),
)
# The target has everything already: Close alone.
CACHED = replace(DIRECT, name="cached", prefix=1)

# Two requests were given one room.
MIXED = replace(DIRECT, name="mixed", wanted=b"another prompt")

_ALL = (DIRECT, CHUNKED, STAGED, STATE, PREPARED, LAYERED, CACHED, MIXED, AHEAD, ONLY_SLOT)
MODELS = {model.name: model for model in _ALL}
