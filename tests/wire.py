"""Source and target machines connected by a fake wire: a queue of events, and time as a value.

Every frame passes through the codec. Writes, scatters and tear-downs end at once unless a test
holds them. Data in a target's pages is counted cell by cell and compared with the plan at Done.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.config import ProtocolConfig
from kvferry.ids import Op, Peer, Room
from kvferry.layout import Layout, Parallel, Span, attention
from kvferry.layout.spec import StateRow
from kvferry.plan import Block, Plan, Request, contiguous_pools
from kvferry.plan.content import cells_between, num_chosen
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.events import (
    Action,
    Choose,
    Chosen,
    Connect,
    Discard,
    Disconnect,
    Disconnected,
    Event,
    Finish,
    Forget,
    Gather,
    Instance,
    LookUp,
    MemoryReached,
    Open,
    Post,
    Prove,
    Proven,
    Push,
    Receive,
    Received,
    ReceiveRequest,
    Release,
    Report,
    Scatter,
    Scattered,
    Send,
    Tick,
    Write,
    WriteEnded,
    WriteFate,
)
from kvferry.protocol.links import Identity, plan_between
from kvferry.protocol.messages import (
    Body,
    Envelope,
    PageTableMessage,
    Staging,
    TransportOffer,
    TransportOffers,
)
from kvferry.protocol.outcome import Done, Failure, Outcome
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine

MODEL = "llama-tiny"
NUM_PAGES = 64
DEADLINE = 60.0
TRANSPORTS = TransportOffers((TransportOffer("wire", "here"),))

DENSE = attention(layers=2, kv_heads=4, head_dim=2)
ROOM = "room-1"

# One entry of the cache in a target's pages: (source, group, layer, token).
Cell = tuple[int, str, int, int]


def always_stage(block: Block) -> bool:
    return True


def never_stage(block: Block) -> bool:
    return False


def cells(plan: Plan, source: int, blocks: tuple[Block, ...]) -> Iterator[Cell]:
    for block in blocks:
        for layer in plan.spec.group(block.group).layers_in(block.layers):
            for token in range(block.tokens.first, block.tokens.end):
                yield (source, block.group, layer, token)


@dataclass
class Held:
    """Operations that a test holds until it ends them."""

    writes: bool = False
    discards: bool = False
    notes: bool = False
    scatters: bool = False
    teardowns: bool = False
    proofs: bool = False
    connects: bool = False


@dataclass
class World:
    """One prefill instance and some decode instances."""

    prefill: Layout
    decodes: tuple[Layout, ...]
    config: ProtocolConfig = field(default_factory=ProtocolConfig)
    staging: Staging = field(default_factory=Staging)
    stages: Callable[[Block], bool] = never_stage
    fingerprint: str = MODEL
    # Transports of the sources, and of the targets.
    transports: tuple[TransportOffers, TransportOffers] = (TRANSPORTS, TRANSPORTS)
    now: float = 100.0
    hold: Held = field(default_factory=Held)
    drops: Callable[[Peer, Envelope], bool] = lambda _, __: False
    sources: dict[Peer, SourceMachine] = field(default_factory=dict)
    targets: dict[Peer, TargetMachine] = field(default_factory=dict)
    pending: deque[tuple[Peer, Event]] = field(default_factory=deque)
    writes: list[tuple[Peer, Write]] = field(default_factory=list)
    # Early gathers neither posted nor discarded, and all gathers so far.
    gathers: dict[tuple[Peer, Op], Gather] = field(default_factory=dict)
    gathered: list[Gather] = field(default_factory=list)
    discards: list[tuple[Peer, Op]] = field(default_factory=list)
    scatters: list[tuple[Peer, Scatter]] = field(default_factory=list)
    teardowns: list[tuple[Peer, Disconnect]] = field(default_factory=list)
    # Proofs in progress, and the sums of cells: by pair, unless a test gives a peer others.
    proofs: list[tuple[Peer, Prove]] = field(default_factory=list)
    sums: dict[Peer, bytes | None] = field(default_factory=dict)
    connects: list[tuple[Peer, Connect]] = field(default_factory=list)
    lookups: list[tuple[Peer, LookUp]] = field(default_factory=list)
    frames: list[tuple[Peer, Envelope]] = field(default_factory=list)
    reports: dict[tuple[Peer, Room], list[Outcome]] = field(
        default_factory=lambda: defaultdict(list)
    )
    releases: Counter[tuple[Peer, Room]] = field(default_factory=Counter)
    landed: dict[tuple[Peer, Room], Counter[Cell]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    pages_used: Counter[Peer] = field(default_factory=Counter)
    requests: dict[tuple[Peer, Room], Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in range(self.prefill.num_ranks):
            self.start_source(rank, incarnation=1000 + rank)
        for index, layout in enumerate(self.decodes):
            for rank in range(layout.num_ranks):
                self.start_target(rank, index, incarnation=2000 + 100 * index + rank)

    # ------------------------------------------------------------ machines

    def start_source(self, rank: int, incarnation: int) -> None:
        me = Peer("prefill", rank)
        self.sources[me] = SourceMachine(
            Identity(me, incarnation, self.prefill, MODEL, b"", self.transports[0]),
            self.config,
        )

    def start_target(self, rank: int, decode_index: int, incarnation: int) -> None:
        me, layout = Peer(f"decode{decode_index}", rank), self.decodes[decode_index]
        pools = contiguous_pools(layout, rank, NUM_PAGES, num_rows=8).map
        identity = Identity(me, incarnation, layout, self.fingerprint, b"", self.transports[1])
        self.targets[me] = TargetMachine(identity, self.config, pools, self.staging)

    def source(self, rank: int = 0) -> SourceMachine:
        return self.sources[Peer("prefill", rank)]

    def target(self, rank: int = 0, decode_index: int = 0) -> TargetMachine:
        return self.targets[Peer(f"decode{decode_index}", rank)]

    def plan(self, decode_index: int = 0) -> Plan:
        return plan_between(self.prefill, self.decodes[decode_index])

    # ------------------------------------------------------------ steps

    def tell(self, peer: Peer, event: Event) -> None:
        """Run one step of one machine and carry out its actions."""
        machine = self.sources.get(peer) or self.targets.get(peer)
        if machine is None:
            return
        chosen: list[Chosen] = []
        for action in machine.handle(event, self.now):
            if isinstance(action, Choose):
                chosen.append(Chosen(action.ticket, tuple(map(self.stages, action.blocks))))
            else:
                self._carry_out(peer, action)
        for answer in chosen:
            self.tell(peer, answer)
        machine.check()

    def run(self) -> None:
        """Deliver events until none is pending."""
        while self.pending:
            self.tell(*self.pending.popleft())

    def wait(self, seconds: float) -> None:
        """Advance the time from timer to timer."""
        end = self.now + seconds
        for _ in range(20_000):
            self.run()
            timers = [m.wakeup() for m in (*self.sources.values(), *self.targets.values())]
            due = min((t for t in timers if t is not None), default=float("inf"))
            if due > end:
                break
            self.now = max(self.now, due)
            for peer in (*self.sources, *self.targets):
                self.pending.append((peer, Tick()))
        else:
            raise AssertionError(f"a timer is due for ever: {timers}, now {self.now}")
        self.now = end
        self.run()

    def _carry_out(self, me: Peer, action: Action) -> None:
        match action:
            case Send(peer, envelope):
                self.post(peer, envelope)
            case Write() | Scatter() | Prove():
                self._begin_copy(me, action)
            case Gather() | Post() | Discard():
                self._gather_ahead(me, action)
            case Disconnect():
                self.teardowns.append((me, action))
                if not self.hold.teardowns:
                    self.end_teardown(self.teardowns.pop())
            case Report(room, outcome, _):
                self.reports[me, room].append(outcome)
                if isinstance(outcome, Done) and outcome.pulled is not None:
                    prefix = min(self.requests[me, room].prefix, outcome.pulled)
                    self.requests[me, room] = Request(outcome.pulled, prefix)
                if isinstance(outcome, Done) and me in self.targets:
                    self._check_landed(me, room)
            case Release(room):
                self.releases[me, room] += 1
            case Connect():
                self._begin_connect(me, action)
            case Forget() | LookUp():
                self.lookups += [(me, action)] if isinstance(action, LookUp) else []
            case _:
                raise AssertionError(f"no such action: {action!r}")

    def post(self, to: Peer, envelope: Envelope) -> None:
        """Put a frame on the wire, unless the test drops it."""
        self.frames.append((to, envelope))
        if self.drops(to, envelope):
            return
        decoded = decode(encode(envelope))
        assert decoded == envelope
        self.pending.append((to, Received(envelope)))

    def _begin_copy(self, me: Peer, action: Write | Scatter | Prove) -> None:
        if isinstance(action, Prove):
            self.proofs.append((me, action))
            if not self.hold.proofs:
                self.end_proof(self.proofs.pop())
            return
        if isinstance(action, Scatter):
            self.scatters.append((me, action))
            if not self.hold.scatters:
                self.end_scatter(self.scatters.pop())
            return
        self.writes.append((me, action))
        if not self.hold.writes:
            self.end_write(self.writes.pop())

    def _gather_ahead(self, me: Peer, action: Gather | Post | Discard) -> None:
        if isinstance(action, Gather):
            self.gathers[me, action.op] = action
            self.gathered.append(action)
            return
        gather = self.gathers.pop((me, action.op))
        if isinstance(action, Post):
            self._begin_copy(me, as_write(gather, action))
            return
        self.discards.append((me, action.op))
        if not self.hold.discards:
            self.end_discard(self.discards.pop())

    def _begin_connect(self, me: Peer, action: Connect) -> None:
        if me in self.sources:
            self.connects.append((me, action))
            if not self.hold.connects:
                self.end_connect(self.connects.pop())

    def end_connect(self, held: tuple[Peer, Connect]) -> None:
        """Report the target's memory as reached by the best transport."""
        me, connect = held
        reached = MemoryReached(connect.session, connect.transports[0].name)
        self.pending.append((me, reached))

    def end_write(self, held: tuple[Peer, Write]) -> None:
        """End a write: deliver its data, its note and its result."""
        me, write = held
        if write.slot is None:
            self._land(write.transfer.peer, me.rank, write.transfer.room, write.blocks)
        if not self.hold.notes:
            self.post(write.transfer.peer, write.note)
        self.pending.append((me, WriteEnded(write.op)))

    def fail_write(self, held: tuple[Peer, Write], fate: WriteFate) -> None:
        self.pending.append((held[0], WriteEnded(held[1].op, fate)))

    def end_discard(self, held: tuple[Peer, Op]) -> None:
        """End a discarded gather."""
        self.pending.append((held[0], WriteEnded(held[1], WriteFate.BUSY)))

    def end_scatter(self, held: tuple[Peer, Scatter]) -> None:
        me, scatter = held
        self._land(me, scatter.source.rank, scatter.room, scatter.blocks)
        self.pending.append((me, Scattered(scatter.op)))

    def end_proof(self, held: tuple[Peer, Prove]) -> None:
        me, prove = held
        cells = cells_between(prove.plan, prove.pair, prove.request, prove.proof)
        right = b"12345678" * num_chosen(cells)
        self.pending.append((me, Proven(prove.op, self.sums.get(me, right))))

    def end_teardown(self, held: tuple[Peer, Disconnect]) -> None:
        me, action = held
        self.pending.append((me, Disconnected(action.session)))

    # ------------------------------------------------------------ what landed

    def _plan_of(self, target: Peer) -> Plan:
        return self.plan(int(target.instance.removeprefix("decode")))

    def _land(self, target: Peer, source: int, room: Room, blocks: tuple[Block, ...]) -> None:
        self.landed[target, room].update(cells(self._plan_of(target), source, blocks))

    def _check_landed(self, target: Peer, room: Room) -> None:
        plan, request = self._plan_of(target), self.requests[target, room]
        owed = Counter(
            cell
            for source in plan.sources_of(target.rank)
            for cell in cells(plan, source, plan.blocks(source, target.rank, request))
        )
        assert self.landed[target, room] == owed, "Done, but not every cell landed exactly once"

    # ------------------------------------------------------------ engines

    def receive(
        self,
        room: Room,
        request: Request,
        decode_index: int = 0,
        deadline: float = DEADLINE,
        only: int | None = None,
    ) -> None:
        """Receive the room on every rank of a decode instance."""
        for peer in [p for p in self.targets if p.instance == f"decode{decode_index}"]:
            if only in (None, peer.rank):
                self.tell(peer, self.receive_event(peer, room, request, self.now + deadline))

    def receive_event(self, peer: Peer, room: Room, request: Request, deadline: float) -> Receive:
        instance = Instance("prefill", MODEL, self.prefill)
        self.requests[peer, room] = request
        self.landed.pop((peer, room), None)  # another attempt has other pages
        wanted = ReceiveRequest(room, request, self.tables(peer, request), deadline)
        return Receive(instance, wanted)

    def tables(self, peer: Peer, request: Request) -> tuple[PageTableMessage, ...]:
        layout = self.targets[peer].layout
        count = -(-request.num_tokens // layout.smallest_page)
        first = self.pages_used[peer]
        self.pages_used[peer] = (first + count) % (NUM_PAGES - 16)
        pages = tuple(reversed(range(first, first + count)))
        return tuple(
            PageTableMessage(g.name, (first % 8,) if isinstance(g.kind, StateRow) else pages)
            for g in layout.spec.groups
        )

    def each_source(self, event: Event) -> None:
        for peer in list(self.sources):
            self.tell(peer, event)

    def open(self, room: Room, deadline: float = DEADLINE) -> None:
        self.each_source(Open(room, self.now + deadline))

    def prefill_all(
        self, room: Room, num_tokens: int, first: int = 0, step: int = 8, metadata: bytes = b"meta"
    ) -> None:
        """Push a prompt in chunks, then finish."""
        for at in range(first, num_tokens, step):
            self.each_source(Push(room, Span(at, min(at + step, num_tokens))))
            self.run()
        self.each_source(Finish(room, num_tokens, metadata))
        self.run()

    def outcomes(self, room: Room) -> set[str]:
        """Return the reported outcomes of a room: "done" or a failure code."""
        return {
            outcome.code if isinstance(outcome, Failure) else "done"
            for (_, name), said in self.reports.items()
            for outcome in said
            if name == room
        }

    def metadata(self, room: Room) -> set[bytes]:
        """Return the metadata that completed targets have received."""
        return {
            outcome.metadata
            for (peer, name), said in self.reports.items()
            for outcome in said
            if name == room and peer in self.targets and isinstance(outcome, Done)
        }

    def sent(self, kind: type[Body]) -> list[Envelope]:
        """Return all frames of a type so far, including lost ones."""
        return [envelope for _, envelope in self.frames if isinstance(envelope.body, kind)]

    def where(self, kind: type[Body], to: Peer | None = None) -> list[Body]:
        return [
            e.body for peer, e in self.frames if isinstance(e.body, kind) and to in (None, peer)
        ]

    # ------------------------------------------------------------ the end

    def tear_down(self, me: Peer, peer: Peer) -> None:
        """Prove to ``me`` that nothing is in flight in its sessions with ``peer``."""
        machine = self.targets[me] if me in self.targets else self.sources[me]
        for session in [link.session for link in machine.links.values() if link.peer == peer]:
            self.tell(me, Disconnected(session))

    def finish(self, attempts: int = 1) -> None:
        """Check that each room was reported and released, and that all tables are empty."""
        self.run()
        held = [*self.writes, *self.gathers, *self.discards, *self.scatters, *self.teardowns]
        assert not held, "the test still holds an operation"
        ended = {key: len(said) for key, said in self.reports.items()}
        assert all(count <= attempts for count in ended.values()), f"reported twice: {ended}"
        assert ended == dict(self.releases), "a report without its release, or the other way"
        for source in self.sources.values():
            assert not source.rooms
            assert not source.inflight.writes
            assert not source.writes.undecided
            assert not source.writes.ready
            assert len(source.inflight.slots) == self.config.local_slots
            assert source.num_quarantined == 0
            assert all(link.state is LinkState.UP for link in source.links.values())
        for target in self.targets.values():
            assert not target.rooms
            assert not target.scatters.under_way
            assert not target.credits.accounts
            assert not target.credits.scattering
            assert sorted(target.credits.free) == list(range(target.staging.num_slots))
            assert target.num_quarantined == 0
            states = {link.state for link in target.links.values()}
            assert states <= {LinkState.UP, LinkState.GREETING}


def as_write(gather: Gather, post: Post) -> Write:
    """Return a posted gather as a write."""
    what = gather.op, gather.transfer, gather.blocks
    return Write(*what, post.note, post.slot, gather.local_slot)


# ---------------------------------------------------------------- small worlds


def dense(tp: int = 1) -> Layout:
    return Layout(DENSE, Parallel(tp=tp), page_tokens=4)


def small_world(
    source_tp: int = 1, target_tp: int = 1, staged: bool = False, **limits: float
) -> World:
    config = ProtocolConfig(**limits)  # type: ignore[arg-type]
    staging = Staging(slot_bytes=64, num_slots=3) if staged else Staging()
    stages = always_stage if staged else never_stage
    return World(dense(source_tp), (dense(target_tp),), config, staging, stages)


def moving(w: World, tokens: int = 16) -> None:
    """Open and receive a room, push half of it, and hold the writes."""
    w.open(ROOM)
    w.receive(ROOM, Request(tokens))
    w.run()
    w.hold.writes = True
    w.each_source(Push(ROOM, Span(0, tokens // 2)))
    w.run()


def let_go(w: World) -> None:
    """End everything that the test holds, and let early records expire."""
    w.hold.writes = w.hold.scatters = w.hold.teardowns = w.hold.notes = False
    while w.writes:
        w.end_write(w.writes.pop())
    while w.scatters:
        w.end_scatter(w.scatters.pop())
    while w.teardowns:
        w.end_teardown(w.teardowns.pop())
    w.wait(2 * w.config.unclaimed_offer_ttl_s + 5)
