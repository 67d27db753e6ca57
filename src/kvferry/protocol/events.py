"""What a machine is told and what it answers: events in, actions out.

Events come from the engine (open, push, receive, ...), from the transport (a
write or scatter ended, a connection is torn down) and from the clock. Actions
are for the runtime to carry out; a machine never waits for one.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property

import msgspec

from kvferry.ids import Generation, Op, Peer, Room, Serial, Session, SlotIndex, Ticket
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout
from kvferry.plan.places import PageTable
from kvferry.plan.plan import Block, Plan, Request
from kvferry.protocol.messages import Envelope, Hello, PageTableMessage, TransportOffer
from kvferry.protocol.outcome import Failure, Outcome


class Event(msgspec.Struct, frozen=True):
    """The root of all events."""


# ---------------------------------------------------------------- for both machines


class Tick(Event, frozen=True):
    """Time has passed."""


class Received(Event, frozen=True):
    """A frame came and was decoded."""

    envelope: Envelope


class Disconnected(Event, frozen=True):
    """Proof: nothing is in flight between that incarnation and us, or ever will be.

    Whoever says this refuses writes that the machine asked for before it heard it.
    With a ``session`` the proof is for that session alone, and the peer may live.
    """

    peer: Peer
    incarnation: int
    session: Session | None = None


class PeerRuns(Event, frozen=True):
    """The process of a link's peer was seen to run at that time, whether it said anything or not.

    Seen below the protocol: by the operating system, or by the connection's own heartbeats.
    """

    session: Session
    at: float


class OwnStall(Event, frozen=True):
    """This endpoint did not run for so long, so nobody was silent meanwhile."""

    seconds: float


class WrongVersion(Event, frozen=True):
    """A frame came in a version that we do not speak. ``answered``: it had no number."""

    sender: Peer
    session: Session
    version: int
    answered: bool


class Cancel(Event, frozen=True):
    """The engine gives the room up, or something of ours broke: then ``failure`` says what."""

    room: Room
    failure: Failure | None = None


# ---------------------------------------------------------------- for a target


class Instance(msgspec.Struct, frozen=True):
    """A prefill instance as the discovery service describes it."""

    name: str
    fingerprint: str
    layout: Layout


class ReceiveRequest(msgspec.Struct, frozen=True, dict=True):
    """An engine's request for a room: the tokens, the pages that it holds for them, a deadline.

    ``digest`` is that of its own request: what does not have the same is not used.
    """

    room: Room
    request: Request
    tables: tuple[PageTableMessage, ...]
    deadline: float
    digest: bytes = b""

    @cached_property
    def page_tables(self) -> dict[str, PageTable]:
        """The tables as a binding takes them, made once."""
        return {table.group: table.as_page_table() for table in self.tables}


class Receive(Event, frozen=True):
    """An engine wants a room from a prefill instance."""

    prefill: Instance
    wanted: ReceiveRequest

    @property
    def room(self) -> Room:
        """Which room."""
        return self.wanted.room

    @property
    def deadline(self) -> float:
        """Until when it must have come."""
        return self.wanted.deadline


class Decline(Event, frozen=True):
    """The engine will not receive this room, so its sources can release their pages."""

    room: Room
    prefill: Instance


class RoomBarred(Event, frozen=True):
    """A source's listener stays shut: it knows another key, or we have the wrong address."""

    peer: Peer
    message: str


class PeerRestarted(Event, frozen=True):
    """A source's name stands for another life now, as the discovery service has it."""

    peer: Peer
    incarnation: int


class MemoryReached(Event, frozen=True):
    """The memory of a session's target can be written, by that transport."""

    session: Session
    transport: str


class MemoryUnreached(Event, frozen=True):
    """No transport reaches the memory of a session's target; why, for each that was tried."""

    session: Session
    problems: tuple[str, ...]


class Scattered(Event, frozen=True):
    """A scatter's bytes are usable."""

    op: Op


# ---------------------------------------------------------------- for a source


class Open(Event, frozen=True):
    """The engine will prefill this room."""

    room: Room
    deadline: float


class Prepare(Event, frozen=True):
    """The engine starts to compute these tokens; their pages are held."""

    room: Room
    tokens: Span


class Push(Event, frozen=True):
    """These tokens of these layers are in the engine's pages and may be read.

    Without ``layers`` they are of all layers. ``states``: the state rows of these layers too
    are what they will be after the request's last token.
    """

    room: Room
    tokens: Span
    layers: Span | None = None
    states: bool = False


class Finish(Event, frozen=True):
    """Everything was pushed; state rows may be read, too. ``metadata`` travels if this is the lead.

    ``digest`` is that of what was computed, the same on every rank.
    """

    room: Room
    num_tokens: int
    metadata: bytes = b""
    digest: bytes = b""


class Chosen(Event, frozen=True):
    """How the blocks of a ``Choose`` travel: for each, whether it goes through staging."""

    ticket: Ticket
    staged: tuple[bool, ...]


class Sent(Event, frozen=True):
    """A write is in the target's memory and no longer reads ours."""

    op: Op


class WriteFate(StrEnum):
    """What is known of a write that did not succeed."""

    BUSY = "busy"  # never submitted: the transport is full, or it was discarded
    FAILED = "failed"  # ended: it reads and writes nothing any more
    UNKNOWN = "unknown"  # may still read our memory and write theirs


class SendFailed(Event, frozen=True):
    """A write did not succeed."""

    op: Op
    fate: WriteFate


# ---------------------------------------------------------------- actions


class Action(msgspec.Struct, frozen=True):
    """The root of all actions."""


class Send(Action, frozen=True):
    """Send a frame. It may be lost."""

    peer: Peer
    envelope: Envelope


class Connect(Action, frozen=True):
    """A peer has a session. ``metadata`` is what it says of itself.

    To a source: reach its memory by the first of these ``transports`` that can, and say
    ``MemoryReached`` or ``MemoryUnreached``; its ``hello``
    says where it may be written. To a target: its memory is written by that one.
    """

    peer: Peer
    incarnation: int
    session: Session
    metadata: bytes
    transports: tuple[TransportOffer, ...] = ()
    hello: Hello | None = None


class Disconnect(Action, frozen=True):
    """Let nothing more start, and say ``Disconnected`` once nothing can land any more."""

    peer: Peer
    incarnation: int
    session: Session


class Forget(Action, frozen=True):
    """Nobody waits for anything of a session that was connected. Said once."""

    session: Session


class TransferRequest(msgspec.Struct, frozen=True, dict=True):
    """One offer of one target for one room: what it wants of a source, and in which pages."""

    room: Room
    session: Session
    generation: Generation
    source: int
    peer: Peer
    plan: Plan
    request: Request
    tables: tuple[PageTableMessage, ...]

    @cached_property
    def page_tables(self) -> dict[str, PageTable]:
        """The tables as a binding takes them, made once for all writes of the offer."""
        return {table.group: table.as_page_table() for table in self.tables}


class Choose(Action, frozen=True):
    """Say with ``Chosen`` which of these blocks go through staging.

    A late or wrong answer costs time and nothing else. An answer that comes after the
    transfer has ended is ignored.
    """

    ticket: Ticket
    transfer: TransferRequest
    blocks: tuple[Block, ...]


class Write(Action, frozen=True):
    """Write blocks of a room into the target's pages, or through ``local_slot`` into ``slot``.

    ``note`` must reach the target after the data.
    """

    op: Op
    transfer: TransferRequest
    blocks: tuple[Block, ...]
    note: Envelope
    slot: SlotIndex | None = None
    local_slot: SlotIndex | None = None


class Gather(Action, frozen=True):
    """Fill ``local_slot`` with blocks of a room, before there is a slot of the target for them.

    It is a write that is answered like any other, but goes no further before its ``Post`` or
    its ``Discard``.
    """

    op: Op
    transfer: TransferRequest
    blocks: tuple[Block, ...]
    local_slot: SlotIndex


class Post(Action, frozen=True):
    """Write what was gathered into ``slot``, as soon as it is. ``note`` follows the data."""

    op: Op
    slot: SlotIndex
    note: Envelope


class Discard(Action, frozen=True):
    """Let go of what was gathered: answer ``BUSY`` once nothing of it is read or written."""

    op: Op


class Scatter(Action, frozen=True):
    """Copy a slot's dense image into the room's pages."""

    op: Op
    room: Room
    source: Peer
    plan: Plan
    request: Request
    blocks: tuple[Block, ...]
    slot: SlotIndex
    serial: Serial


class Report(Action, frozen=True):
    """The room has ended for its caller. Said once."""

    room: Room
    outcome: Outcome


class Release(Action, frozen=True):
    """The room's pages are the engine's again: nothing reads or writes them. Said once."""

    room: Room
