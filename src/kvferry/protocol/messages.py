"""Messages between a target and a source: one frozen struct each, every field bounded.

``codec`` turns messages into bytes; ``source`` and ``target`` act on them. The fields of the
envelope are the same in every version, so that an endpoint can identify the sender of any
frame and refuse a version that it does not support.
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
from kvferry.plan.content import ProofRequest
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import MAX_TOKENS, Block, Request
from kvferry.prefix import MAX_SHORT_CHAIN, checked_short_chain
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
# Above 8 bytes for each layer of each group of any cache.
MAX_SUMS = 1 << 21
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
    """A target's staging pool: ``num_slots`` slots of ``slot_bytes`` each; zero without a pool."""

    slot_bytes: Count = 0
    num_slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)] = 0


TransportName = Annotated[str, Meta(max_length=64)]


class TransportOffer(msgspec.Struct, frozen=True, array_like=True):
    """A transport that an endpoint has. It connects endpoints of equal ``realm`` only.

    ``payload`` is the transport's own data that a peer needs to write here.
    """

    name: TransportName
    realm: Text
    payload: Blob = b""


class TransportLack(msgspec.Struct, frozen=True, array_like=True):
    """A transport that an endpoint does not have, and why."""

    name: TransportName
    why: Annotated[str, Meta(max_length=MAX_WHY)]


class TransportOffers(msgspec.Struct, frozen=True, array_like=True):
    """The transports that an endpoint has, best first, and those that it lacks."""

    held: Annotated[tuple[TransportOffer, ...], Meta(max_length=MAX_TRANSPORTS)] = ()
    lacked: Annotated[tuple[TransportLack, ...], Meta(max_length=MAX_TRANSPORTS)] = ()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Target to source: the target's model, layout, memory and transports."""

    fingerprint: Text
    layout: Layout
    pools: PoolMap
    staging: Staging = Staging()
    metadata: Blob = b""
    transports: TransportOffers = TransportOffers()


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Source to target: the handshake fits; the plan's digest and the transport in use.

    ``answers``: the source knows Ask. Sources of kvferry before pulls do not.
    """

    fingerprint: Text
    layout: Layout
    digest: Text
    metadata: Blob = b""
    transport: TransportName = ""
    answers: bool = False


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
    """Either direction: the two endpoints can't work together, and why."""

    code: RefusalCode
    message: Text


class NoSession(msgspec.Struct, frozen=True, array_like=True, tag="no-session"):
    """Either direction: the session of the received frame is unknown here."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Either direction: the sender is alive.

    The optional fields measure clock offsets: ``asked`` is the requester's time; in the reply,
    ``heard`` and ``said`` are the times of receipt and reply. Machines ignore them, and so do
    older peers.
    """

    asked: ClockTime | None = None
    heard: ClockTime | None = None
    said: ClockTime | None = None


# ---------------------------------------------------------------- rooms


class RoomMessage(msgspec.Struct, frozen=True, array_like=True):
    """Base class of messages about one attempt at a room."""

    room: Room
    generation: GenerationField


class PageTableMessage(msgspec.Struct, frozen=True, array_like=True):
    """The target's pages for one group."""

    group: Text
    pages: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_PAGES)]
    first_page: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


class Offer(RoomMessage, frozen=True, array_like=True, tag="offer"):
    """Target to source: write this room's cache into these pages.

    ``proof``: the sums of which cells to send with Close; None for no proof.
    """

    request: Request
    tables: Annotated[tuple[PageTableMessage, ...], Meta(max_length=MAX_TABLES)]
    remaining_s: Annotated[float, Meta(gt=0, le=MAX_REMAINING_S)]
    proof: ProofRequest | None = None

    def __post_init__(self) -> None:
        if self.request.num_tokens > MAX_TOKENS:
            raise InputError(f"an offer has at most {MAX_TOKENS} tokens")


class Ask(RoomMessage, frozen=True, array_like=True, tag="ask"):
    """Target to lead source: how many first tokens of this sequence does the instance hold?

    ``chain`` is the sequence's short chain (``kvferry.prefix``). The target has the first
    ``prefix`` tokens already.
    """

    chain: Annotated[bytes, Meta(max_length=MAX_SHORT_CHAIN)]
    prefix: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    remaining_s: Annotated[float, Meta(gt=0, le=MAX_REMAINING_S)]

    def __post_init__(self) -> None:
        checked_short_chain(self.chain)


class Holding(RoomMessage, frozen=True, array_like=True, tag="holding"):
    """Lead source to target: the room is about the first ``num_tokens`` tokens; 0 ends it."""

    num_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Accept(RoomMessage, frozen=True, array_like=True, tag="accept"):
    """Source to target: the offer has arrived."""


class Want(RoomMessage, frozen=True, array_like=True, tag="want"):
    """Source to target: the number of credits this room needs in total. Idempotent."""

    total: Count


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """The right to write once into one staging slot of the target."""

    serial: SerialField
    slot: Annotated[SlotIndex, Meta(ge=0, le=1 << 20)]


class Grant(RoomMessage, frozen=True, array_like=True, tag="grant"):
    """Target to source: all granted credits that have not been used yet. Idempotent."""

    credits: Annotated[tuple[Credit, ...], Meta(max_length=MAX_CREDITS)]


class Arrived(RoomMessage, frozen=True, array_like=True, tag="arrived"):
    """Source to target, after the data: blocks are in the pages, or in the credit's slot."""

    blocks: Blocks
    serial: SerialField | None = None


class StatusPoll(RoomMessage, frozen=True, array_like=True, tag="nudge"):
    """Target to source: repeat the state of this room, and the notes for these credits."""

    serials: Annotated[tuple[SerialField, ...], Meta(max_length=MAX_CREDITS)] = ()


class Close(RoomMessage, frozen=True, array_like=True, tag="close"):
    """Source to target: everything owed is written. ``written``: blocks sent without credits.

    Every source sends the ``digest`` of the computed request; empty if its engine gave none.
    ``sums``: 8 bytes for each cell that the offer's proof chooses, little-endian; None if there is
    no proof, or the source can't compute them.
    """

    num_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    written: Blocks
    metadata: Blob | None = None
    digest: Digest = b""
    sums: Annotated[bytes, Meta(max_length=MAX_SUMS)] | None = None


class Complete(RoomMessage, frozen=True, array_like=True, tag="complete"):
    """Target to source: the room is complete and may be forgotten."""


class Abort(RoomMessage, frozen=True, array_like=True, tag="abort"):
    """Either direction: the room has failed. A source stops writing and answers Drained.

    ``accepted``: the target has received a message from this source about this attempt.
    """

    failure: Failure
    accepted: bool = False


class Drained(RoomMessage, frozen=True, array_like=True, tag="drained"):
    """Source to target: no write for this attempt is in flight, and none will start.

    ``heard`` is the last sequence number received from the target. If a later Offer is still
    on its way, this message proves nothing.
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
    | Ask
    | Holding
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
    """A message with its sender. ``seq`` is 0 for messages that may arrive in any order."""

    sender: Peer
    incarnation: int
    session: Session
    seq: int
    body: Body
