"""The models to explore: one room from one source rank to two target ranks, and its faults.

The times are chosen so that paths are short and every timer matters: a loss is repaired well before
the deadline, and the deadline comes before silence, so that each of them ends a room on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.endpoint.runner.runner import MachineRunner, SourcePorts, TargetPorts
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
from kvferry.testing.sim.cluster import Machines
from kvferry.testing.sim.wire import TRANSPORTS

ROOM = "room"
METADATA = b"first token"
DIGEST = b"the prompt"
FINGERPRINT = "model"
SOURCE = 0
TARGETS = (1, 2)
PEERS = (Peer("prefill", 0), Peer("decode", 0), Peer("decode", 1))
INCARNATIONS = (100, 101, 102)

REAL = Machines()
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
    """The faults. A path has at most ``ExploredModel.max_faults`` of them."""

    DROP = "a frame is lost"
    DROP_NOTE = "an arrival note is lost"
    DUPLICATE = "a frame or note arrives twice"
    DELAY = "a frame or note arrives at any later time, or never"
    BUSY = "the transport is full, so a write is not submitted"
    FAILED = "a write fails"
    UNKNOWN = "the fate of a write is unknown; it may land until the connection is cut"
    STALL = "a write takes long, and time passes meanwhile"
    CUT = "the connection between the source and a target is cut, and both are told"
    CANCEL_SOURCE = "the source's engine cancels the room"
    CANCEL_TARGET = "a target's engine cancels the room"
    KILL_SOURCE = "the source dies; its submitted writes may still land"
    KILL_TARGET = "a target dies"
    ABSENT = "an engine does nothing more for the room"
    TICK = "one endpoint's clock runs ahead to its next timer"
    DEADLINE = "one endpoint's clock runs ahead to the room's deadline"
    SILENCE = "one endpoint's clock runs ahead by silence_s"


# The protocol repairs these: everybody must still be Done.
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
    """One configuration.

    - ``wanted``: the digest that the targets' engines give; if it differs from the source's,
      nobody may ever be Done.
    - ``prepares``: the source's engine asks for credits before it pushes.
    - ``heedless``: an engine continues after the end was reported to it.
    - ``by_layers``: each push goes layer by layer, the last layer first.
    - ``staged``: every block goes through slots.
    - ``horizon_s``: a path that has not ended by then is a hang.
    - ``in_order``: each direction of a link delivers frames in order.
    - ``faults_at``: the endpoints that faults may concern. The two targets differ only in their
      names, so faults at the source and one target are all faults up to swapping the targets.
    - ``machines``: the machines and runners, which a test may replace by broken ones.
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
    machines: Machines = REAL

    @property
    def is_mixed_up(self) -> bool:
        """Whether the two sides mean different requests."""
        return self.wanted != DIGEST

    @property
    def request(self) -> Request:
        """The room's request."""
        return Request(self.num_tokens, self.prefix)

    def layouts(self) -> tuple[Layout, Layout]:
        """Return the layouts of the source (TP1) and of the targets (TP2)."""
        return (
            Layout(self.spec, Parallel(tp=1), page_tokens=1),
            Layout(self.spec, Parallel(tp=2), page_tokens=1),
        )

    def runners(self, ports: Any) -> tuple[MachineRunner[Any, Any], ...]:
        """Return new runners of the source and its targets; ``ports`` is every port of each."""
        prefill, decode = self.layouts()

        def identity(index: int, layout: Layout) -> Identity:
            return Identity(PEERS[index], INCARNATIONS[index], layout, FINGERPRINT, b"", TRANSPORTS)

        source_ports = SourcePorts(ports, ports, ports, ports)
        source = self.machines.new_source(identity(SOURCE, prefill), self.times, source_ports)
        targets = (
            self.machines.new_target(
                identity(index, decode),
                self.times,
                contiguous_pools(decode, PEERS[index].rank, self.num_tokens).map,
                self.staging,
                TargetPorts(ports, ports, ports, ports),
            )
            for index in TARGETS
        )
        return (source, *targets)

    def scripts(self) -> tuple[tuple[Event, ...], ...]:
        """Return the calls of each engine in order; calls of different engines interleave."""
        source = (
            Open(ROOM, self.deadline_s),
            *(Prepare(ROOM, Span(first, end)) for first, end in self.pushes if self.prepares),
            *(Push(ROOM, Span(*span), layers) for span in self.pushes for layers in self._layers()),
            Finish(ROOM, self.num_tokens, METADATA, DIGEST),
        )
        prefill, _ = self.layouts()
        instance = Instance(PEERS[SOURCE].instance, FINGERPRINT, prefill)
        wanted = self.request, self._tables(), self.deadline_s, self.wanted
        receive = Receive(instance, ReceiveRequest(ROOM, *wanted))
        return (source, *((receive,) for _ in TARGETS))

    def _layers(self) -> list[Span | None]:
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


def _models() -> tuple[ExploredModel, ...]:
    one_layer = attention(layers=1, kv_heads=2, head_dim=1)
    two_layers = attention(layers=2, kv_heads=2, head_dim=1)
    paged = two_layers.groups[0]
    kv = Group(paged.name, Paged(), (0,), paged.units, paged.tensors)
    state = Group("state", StateRow(), (1,), 2, (Tensor("ssm", DType.FLOAT32, 1),))
    # One write to each target, straight into its pages.
    direct = ExploredModel(name="direct", spec=one_layer)
    # Two staged writes to each target through its single slot, and one local slot for both.
    staged = ExploredModel(
        name="staged",
        spec=one_layer,
        num_tokens=2,
        pushes=((0, 2),),
        staging=Staging(one_layer.groups[0].unit_bytes, 1),
        staged=True,
    )

    def early(local_slots: int) -> ProtocolConfig:
        return msgspec.structs.replace(TIMES, local_slots=local_slots, early_gather_slots=1)

    return (
        direct,
        # Two pushes, so that writes of one transfer overlap and overtake.
        ExploredModel(name="chunked", spec=one_layer, num_tokens=2, pushes=((0, 1), (1, 2))),
        staged,
        # Pages as they are pushed, a state row at the end.
        ExploredModel(name="state", spec=CacheSpec(num_layers=2, groups=(kv, state))),
        replace(staged, name="prepared", prepares=True),
        # Two layers of one chunk, pushed one by one, the upper one first.
        ExploredModel(name="layered", spec=two_layers, by_layers=True),
        # The target has everything already, so the source only closes.
        replace(direct, name="cached", prefix=1),
        # Two requests have the same room.
        replace(direct, name="mixed", wanted=b"another prompt"),
        # The second staged write to each target is gathered while its slot is still in use.
        replace(staged, name="early", times=early(local_slots=2)),
        # One local slot for early gathers of both targets: a write with a credit takes it back.
        replace(staged, name="only-slot", times=early(local_slots=1)),
    )


MODELS = {model.name: model for model in _models()}
