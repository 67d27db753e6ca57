"""Input and output of a machine: events in, actions out.

Events come from the engine (open, push, receive, ...), from the transport (a write or scatter
ended, a connection is torn down) and from the clock. The endpoint carries out the actions; a
machine never waits for one.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import cached_property

import msgspec

from kvferry.digest import checked_digest
from kvferry.errors import InputError
from kvferry.ids import Generation, Op, Peer, Room, Serial, Session, SlotIndex, Ticket
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout
from kvferry.plan.bind import RankPair
from kvferry.plan.content import ProofRequest
from kvferry.plan.places import PageTable
from kvferry.plan.plan import Block, Plan, Request
from kvferry.prefix import PrefixChain
from kvferry.protocol.messages import (
    MAX_METADATA,
    MAX_PAGES,
    MAX_TABLES,
    Envelope,
    Hello,
    PageTableMessage,
    TransportOffer,
)
from kvferry.protocol.outcome import Failure, Outcome


class Event(msgspec.Struct, frozen=True):
    """Base class of events."""


# ---------------------------------------------------------------- for both machines


class Tick(Event, frozen=True):
    """Time has passed."""


class Received(Event, frozen=True):
    """A frame has arrived and was decoded."""

    envelope: Envelope

    @property
    def session(self) -> Session:
        """The frame's session."""
        return self.envelope.session


class Disconnected(Event, frozen=True):
    """Proof that nothing is in flight in a session, and nothing will be. Its peer may be alive.

    The endpoint refuses writes that the machine requested before it handled this event.
    """

    session: Session


class PeerRuns(Event, frozen=True):
    """The peer's process was running at time ``at``, even if it has sent no frame.

    Observed below the protocol, by the operating system or the connection's own heartbeats.
    """

    session: Session
    at: float


class OwnStall(Event, frozen=True):
    """This endpoint did not run for ``seconds``. That time must not count as a peer's silence."""

    seconds: float


class WrongVersion(Event, frozen=True):
    """A frame has another protocol version. ``answered``: it is a reply, so it gets none."""

    sender: Peer
    session: Session
    version: int
    answered: bool


class Proven(Event, frozen=True):
    """The answer to a ``Prove``; ``sums`` is None if they can't be computed here.

    The pages are not read any more.
    """

    op: Op
    sums: bytes | None
    problem: str = ""


class Cancel(Event, frozen=True):
    """The engine aborts the room, or the endpoint does because of a local ``failure``."""

    room: Room
    failure: Failure | None = None


# ---------------------------------------------------------------- for a target


class Instance(msgspec.Struct, frozen=True):
    """A prefill instance as registered with the discovery service."""

    name: str
    fingerprint: str
    layout: Layout


class ReceiveRequest(msgspec.Struct, frozen=True, dict=True):
    """A target engine's request for a room: tokens, the pages held for them and a deadline.

    ``digest`` identifies the engine's request. Cache with another digest is not used.
    With a ``chain`` the room is a pull: the source's answer gives its length, and the chain its
    digest. The request is then the longest one possible.
    """

    room: Room
    request: Request
    tables: tuple[PageTableMessage, ...]
    deadline: float
    digest: bytes = b""
    chain: PrefixChain | None = None

    def __post_init__(self) -> None:
        checked_digest(self.digest)
        if len(self.tables) > MAX_TABLES or any(len(t.pages) > MAX_PAGES for t in self.tables):
            raise InputError(
                f"a room has at most {MAX_TABLES} tables of {MAX_PAGES} pages; use larger ones"
            )

    @cached_property
    def page_tables(self) -> dict[str, PageTable]:
        """The page tables by group, in the form that binding takes."""
        return {table.group: PageTable(table.pages, table.first_page) for table in self.tables}


class Receive(Event, frozen=True):
    """The engine wants to receive a room from a prefill instance."""

    prefill: Instance
    wanted: ReceiveRequest

    @property
    def room(self) -> Room:
        """Id of the room."""
        return self.wanted.room

    @property
    def deadline(self) -> float:
        """Time by which the room must be complete."""
        return self.wanted.deadline


class Decline(Event, frozen=True):
    """The engine will not receive this room, so its sources may release their pages."""

    room: Room
    prefill: Instance


class ConnectRefused(Event, frozen=True):
    """A source's listener refuses the connection: another cluster key, or a wrong address."""

    peer: Peer
    message: str


class PeerRestarted(Event, frozen=True):
    """The discovery service reports a new incarnation of a source."""

    peer: Peer
    incarnation: int


class MemoryReached(Event, frozen=True):
    """``transport`` can write a target's memory; empty if none can. ``problems`` say why."""

    session: Session
    transport: str
    problems: tuple[str, ...] = ()


class Scattered(Event, frozen=True):
    """A scatter has ended; its bytes are in the pages."""

    op: Op


# ---------------------------------------------------------------- for a source


class Open(Event, frozen=True):
    """The engine will prefill this room."""

    room: Room
    deadline: float


class Prepare(Event, frozen=True):
    """The engine starts to compute these tokens and holds pages for them."""

    room: Room
    tokens: Span


class Push(Event, frozen=True):
    """These tokens of these layers are in the engine's pages and may be read.

    ``layers`` of None means all layers. ``states``: the state rows of these layers are final, too.
    """

    room: Room
    tokens: Span
    layers: Span | None = None
    states: bool = False


class Finish(Event, frozen=True):
    """Everything was pushed, and all state rows are final.

    Only the lead rank sends ``metadata``. ``digest`` identifies the computed request and is the
    same on every rank.
    """

    room: Room
    num_tokens: int
    metadata: bytes = b""
    digest: bytes = b""

    def __post_init__(self) -> None:
        checked_digest(self.digest)
        if len(self.metadata) > MAX_METADATA:
            raise InputError(
                f"metadata must have at most {MAX_METADATA} bytes, not {len(self.metadata)}"
            )


class Held(Event, frozen=True):
    """The engine's answer to a ``LookUp``: it holds the first ``num_tokens`` tokens.

    Unless they are 0, the engine opens the room at each of its ranks and pushes them.
    """

    room: Room
    num_tokens: int


class Chosen(Event, frozen=True):
    """The answer to a ``Choose``: for each block, whether it goes through staging."""

    ticket: Ticket
    staged: tuple[bool, ...]


class WriteFate(StrEnum):
    """The knowledge about a write that did not succeed."""

    BUSY = "busy"  # never submitted: the transport is full, or the write was discarded
    FAILED = "failed"  # ended: it no longer reads or writes memory
    UNKNOWN = "unknown"  # may still read local and write remote memory


class WriteEnded(Event, frozen=True):
    """The result of a write. ``fate`` is None if all of it is in the target's memory.

    Local memory is not read any more, unless the fate is unknown. ``detail`` is for logs.
    """

    op: Op
    fate: WriteFate | None = None
    detail: str = ""


# ---------------------------------------------------------------- actions


class Action(msgspec.Struct, frozen=True):
    """Base class of actions."""


class Send(Action, frozen=True):
    """Send a frame. It may be lost."""

    peer: Peer
    envelope: Envelope


class Connect(Action, frozen=True):
    """A session with a peer has begun. ``metadata`` is the peer's.

    A source connects to the target's memory, which ``hello`` describes, with the first of the
    ``transports`` that works, and answers ``MemoryReached``. A target is
    given the one transport that its source has connected.
    """

    peer: Peer
    incarnation: int
    session: Session
    metadata: bytes
    transports: tuple[TransportOffer, ...] = ()
    hello: Hello | None = None


class Disconnect(Action, frozen=True):
    """Start no more writes, and answer ``Disconnected`` once none can arrive any more."""

    session: Session


class Forget(Action, frozen=True):
    """Release what belongs to a connected session. Emitted once per session."""

    session: Session


class TransferRequest(msgspec.Struct, frozen=True, dict=True):
    """One target's offer for one room: the request, and the pages for what the source owes."""

    room: Room
    session: Session
    generation: Generation
    source: int
    peer: Peer
    plan: Plan
    request: Request
    tables: tuple[PageTableMessage, ...]
    proof: ProofRequest | None = None

    @cached_property
    def page_tables(self) -> dict[str, PageTable]:
        """The page tables by group, in the form that binding takes."""
        return {table.group: PageTable(table.pages, table.first_page) for table in self.tables}


class LookUp(Action, frozen=True):
    """Ask the engine how much it holds of a short chain (``Held``), before ``deadline``.

    ``peer`` is the first target that asks; it has the first ``prefix`` tokens already.
    """

    room: Room
    peer: Peer
    chain: bytes
    prefix: int
    deadline: float


class Choose(Action, frozen=True):
    """Bind these blocks, predict the costs, and answer which go through staging (``Chosen``).

    A late or wrong answer costs time, never correctness. An answer that arrives after the
    transfer has ended is ignored.
    """

    ticket: Ticket
    transfer: TransferRequest
    blocks: tuple[Block, ...]


class Write(Action, frozen=True):
    """Write blocks into the target's pages, or through ``local_slot`` into its ``slot``.

    ``note`` must reach the target after the data.
    """

    op: Op
    transfer: TransferRequest
    blocks: tuple[Block, ...]
    note: Envelope
    slot: SlotIndex | None = None
    local_slot: SlotIndex | None = None


class Gather(Action, frozen=True):
    """Fill ``local_slot`` with blocks before the target has granted a slot for them.

    A gather is answered like any write. It stops after the copy and waits for its ``Post`` or
    its ``Discard``.
    """

    op: Op
    transfer: TransferRequest
    blocks: tuple[Block, ...]
    local_slot: SlotIndex


class Post(Action, frozen=True):
    """Write the gathered data into the target's ``slot``; ``note`` follows the data."""

    op: Op
    slot: SlotIndex
    note: Envelope


class Discard(Action, frozen=True):
    """Drop the gathered data, and answer ``BUSY`` once no copy reads or writes the slot."""

    op: Op


class Scatter(Action, frozen=True):
    """Copy a staging slot into the room's pages."""

    op: Op
    room: Room
    source: Peer
    plan: Plan
    request: Request
    blocks: tuple[Block, ...]
    slot: SlotIndex
    serial: Serial


class Prove(Action, frozen=True):
    """Compute the sums of what ``pair.source`` sends ``pair.target`` from the room's pages.

    Answered once by ``Proven``, until which the pages must not be released.
    """

    op: Op
    room: Room
    plan: Plan
    pair: RankPair
    request: Request
    proof: ProofRequest


class Report(Action, frozen=True):
    """Report the outcome of a room. Emitted once per room.

    ``unusable``: the blocks of a failed room that did not arrive or can't be trusted; None for
    all of them.
    """

    room: Room
    outcome: Outcome
    unusable: tuple[Block, ...] | None = None


class Release(Action, frozen=True):
    """Return the room's pages to the engine. Nothing accesses them. Emitted once per room."""

    room: Room


class Outbox:
    """Actions of the current step and the time of that step. ``counts`` are lifetime counters."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.actions: list[Action] = []

    def do(self, action: Action) -> None:
        """Emit an action."""
        self.actions.append(action)
