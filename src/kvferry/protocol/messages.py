"""What travels between a target and a source: one frozen struct per meaning.

Every field is bounded. Nothing here acts; ``codec`` turns messages into bytes
and ``source`` and ``target`` decide what they mean.

The envelope's fields never change between versions, so that an endpoint can
always tell who sent a frame and refuse a version that it does not speak.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.digest import MAX_DIGEST
from kvferry.errors import InputError
from kvferry.ids import Generation, Peer, Room, Serial, Session, SlotIndex
from kvferry.layout.layout import Layout
from kvferry.plan.places import PageTable, PoolMap
from kvferry.plan.plan import MAX_TOKENS, Block, Request
from kvferry.protocol.outcome import MAX_TEXT, Failure

VERSION = 3

MAX_PAGES = 1 << 19
MAX_SLOTS = 1 << 20
MAX_BLOCKS = 4096
MAX_CREDITS = 1024
MAX_METADATA = 1 << 20
MAX_COUNT = 1 << 40
MAX_TABLES = 64
MAX_TRANSPORTS = 16
MAX_WHY = 256
MIN_REMAINING_S, MAX_REMAINING_S = 1e-3, 1e7

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Blob = Annotated[bytes, Meta(max_length=MAX_METADATA)]
Digest = Annotated[bytes, Meta(max_length=MAX_DIGEST)]
ClockTime = Annotated[float, Meta(ge=0, le=1e12)]
Blocks = Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)]
GenerationField = Annotated[Generation, Meta(ge=0, le=MAX_COUNT)]
SerialField = Annotated[Serial, Meta(ge=0, le=MAX_COUNT)]


# ---------------------------------------------------------------- handshake


class Staging(msgspec.Struct, frozen=True, array_like=True):
    """A target's staging pool: ``num_slots`` of ``slot_bytes``; none where it has no pool."""

    slot_bytes: Count = 0
    num_slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0


TransportName = Annotated[str, Meta(max_length=64)]


class TransportOffer(msgspec.Struct, frozen=True, array_like=True):
    """A transport that an endpoint holds. Only endpoints of one ``realm`` reach each other by it.

    ``payload`` is what its peers need in order to write here.
    """

    name: TransportName
    realm: Text
    payload: Blob = b""


class TransportLack(msgspec.Struct, frozen=True, array_like=True):
    """A transport that an endpoint does not hold, and why."""

    name: TransportName
    why: Annotated[str, Meta(max_length=MAX_WHY)]


class TransportOffers(msgspec.Struct, frozen=True, array_like=True):
    """Every transport that an endpoint holds, best first, and those that it had to do without."""

    held: Annotated[tuple[TransportOffer, ...], Meta(max_length=MAX_TRANSPORTS)] = ()
    lacked: Annotated[tuple[TransportLack, ...], Meta(max_length=MAX_TRANSPORTS)] = ()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Target to source: who I am, what I hold, where and by what it may be written."""

    fingerprint: Text
    layout: Layout
    pools: PoolMap
    staging: Staging = Staging()
    metadata: Blob = b""
    transports: TransportOffers = TransportOffers()


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Source to target: we fit, this is the plan that I derived, and I reach you by that."""

    fingerprint: Text
    layout: Layout
    digest: Text
    metadata: Blob = b""
    transport: TransportName = ""


class RefusalCode(StrEnum):
    """Why a handshake was refused."""

    VERSION = "version"
    FINGERPRINT = "fingerprint"
    LAYOUT = "layout"
    POOLS = "pools"
    DIGEST = "digest"
    TRANSPORT = "transport"
    TOO_MANY_PEERS = "too-many-peers"


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """Either way: this pair can't work, and why."""

    code: RefusalCode
    message: Text


class NoSession(msgspec.Struct, frozen=True, array_like=True, tag="no-session"):
    """Either way: I know nothing of the session that your frame named."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Either way: I am here.

    Beside that it may measure clocks: ``asked`` is the asker's time, and in the answer ``heard``
    and ``said`` are the other's. Machines do not look at them, and earlier peers neither send
    nor read them.
    """

    asked: ClockTime | None = None
    heard: ClockTime | None = None
    said: ClockTime | None = None


# ---------------------------------------------------------------- rooms


class RoomMessage(msgspec.Struct, frozen=True, array_like=True):
    """What every message about a room names."""

    room: Room
    generation: GenerationField


class PageTableMessage(msgspec.Struct, frozen=True, array_like=True):
    """The target's pages of one group."""

    group: Text
    pages: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_PAGES)]
    first_page: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0

    def as_page_table(self) -> PageTable:
        """As a binding takes it."""
        return PageTable(self.pages, self.first_page)


class Offer(RoomMessage, frozen=True, array_like=True, tag="offer"):
    """Target to source: these pages are yours to write for this room."""

    request: Request
    tables: Annotated[tuple[PageTableMessage, ...], Meta(max_length=MAX_TABLES)]
    remaining_s: Annotated[float, Meta(gt=0, le=MAX_REMAINING_S)]

    def __post_init__(self) -> None:
        if self.request.num_tokens > MAX_TOKENS:
            raise InputError(f"an offer is for at most {MAX_TOKENS} tokens")


class Accept(RoomMessage, frozen=True, array_like=True, tag="accept"):
    """Source to target: I have your offer."""


class Want(RoomMessage, frozen=True, array_like=True, tag="want"):
    """Source to target: this room needs so many credits in all. Idempotent."""

    total: Count


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """The right to write once into one staging slot."""

    serial: SerialField
    slot: Annotated[SlotIndex, Meta(ge=0, le=1 << 20)]


class Grant(RoomMessage, frozen=True, array_like=True, tag="grant"):
    """Target to source: every credit of yours that I have not seen used. Idempotent."""

    credits: Annotated[tuple[Credit, ...], Meta(max_length=MAX_CREDITS)]


class Arrived(RoomMessage, frozen=True, array_like=True, tag="arrived"):
    """Source to target, behind the data: these blocks are in your pages, or in that slot."""

    blocks: Blocks
    serial: SerialField | None = None


class StatusPoll(RoomMessage, frozen=True, array_like=True, tag="nudge"):
    """Target to source: say again how this room stands, and what became of these credits."""

    serials: Annotated[tuple[SerialField, ...], Meta(max_length=MAX_CREDITS)] = ()


class Close(RoomMessage, frozen=True, array_like=True, tag="close"):
    """Source to target: all that I owe is written; without credits, these blocks.

    ``digest`` is that of what was computed, from every source; empty if its engine gave none.
    """

    num_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    written: Blocks
    metadata: Blob | None = None
    digest: Digest = b""


class Complete(RoomMessage, frozen=True, array_like=True, tag="complete"):
    """Target to source: this room is done, forget it."""


class Abort(RoomMessage, frozen=True, array_like=True, tag="abort"):
    """Either way: this room has failed. A source stops writing and answers Drained.

    ``accepted`` says that the source has been heard about this attempt.
    """

    failure: Failure
    accepted: bool = False


class Drained(RoomMessage, frozen=True, array_like=True, tag="drained"):
    """Source to target: nothing of mine is in flight for this room, and nothing will be.

    ``heard`` is the last number heard from the target. An Offer with a later
    one may still be under way, and then this proves nothing.
    """

    failure: Failure
    heard: Count


Body = (
    Hello
    | Welcome
    | Refuse
    | NoSession
    | Heartbeat
    | Offer
    | Accept
    | Want
    | Grant
    | Arrived
    | StatusPoll
    | Close
    | Complete
    | Abort
    | Drained
)


class Envelope(msgspec.Struct, frozen=True):
    """A message with its sender. ``seq`` is 0 for what may come in any order."""

    sender: Peer
    incarnation: int
    session: Session
    seq: int
    body: Body
