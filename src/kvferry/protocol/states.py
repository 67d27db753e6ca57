"""State machines of the protocol, as literal transition tables.

**Link**: one endpoint's connection to one peer in one session. The target starts it with Hello,
and it is *up* when a fitting Welcome arrives; a source's link is *up* when the target has
answered its Welcome. A link is *lost* when the peer is silent, has restarted or refuses. A lost
link proves nothing: memory that the peer may still write stays reserved until the link is
*gone*, which the transport reports once the connection is torn down and no write can arrive.

**Inbound transfer**: what a target expects from one source in one room. It is *connecting*
until the link is up, *asking* while a pull waits for the answer of the lead source, *offered* when
the Offer is sent, *accepted* when the source has answered,
and *closed* when the source has written everything. If the room fails, each inbound transfer
becomes *draining*: the source was told to stop and must confirm. *Quiet* means that this source
provably writes nothing more for this room; a transfer that was never offered is quiet at once.

**Source room**: *early* while only offers for it have arrived, and *warned* if these were
aborted before the engine opened it; both expire. It is *open* once the engine has opened it,
*finished* when the engine has pushed everything, and *failing* from the first failure until its
last write has ended. If some target has not sent an offer by then, the room stays *over* for a
while, so that a late offer is refused at once.

**Outbound transfer**: what a source owes one target in one room. It is *sending* until
everything is written, *closed* while it waits for the target's Complete, and *draining* while
writes of a failed room are in flight.

Final states are not in the tables: an ended object is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


class LinkState(StrEnum):
    """State of a link."""

    GREETING = "greeting"
    UP = "up"
    LOST = "lost"
    GONE = "gone"


class LinkStep(StrEnum):
    """Transition of a link."""

    FITS = "Welcome fits, or was confirmed"
    LOSE = "silent, restarted, refused"
    GONE = "connection torn down"


LINK: dict[tuple[LinkState, LinkStep], LinkState] = {
    (LinkState.GREETING, LinkStep.FITS): LinkState.UP,
    (LinkState.GREETING, LinkStep.LOSE): LinkState.LOST,
    (LinkState.UP, LinkStep.LOSE): LinkState.LOST,
    (LinkState.LOST, LinkStep.GONE): LinkState.GONE,
}


class InboundState(StrEnum):
    """State of an inbound transfer."""

    CONNECTING = "connecting"
    ASKING = "asking"
    OFFERED = "offered"
    ACCEPTED = "accepted"
    CLOSED = "closed"
    DRAINING = "draining"
    QUIET = "quiet"


class InboundStep(StrEnum):
    """Transition of an inbound transfer."""

    ASK = "link is up, Ask sent"
    LINKED = "link is up, Offer sent"
    ACCEPTED = "source has answered"
    CLOSED = "Close received"
    FAIL = "room fails, Abort sent"
    QUIET = "Drained received, or peer gone"


INBOUND: dict[tuple[InboundState, InboundStep], InboundState] = {
    (InboundState.CONNECTING, InboundStep.ASK): InboundState.ASKING,
    (InboundState.CONNECTING, InboundStep.LINKED): InboundState.OFFERED,
    (InboundState.CONNECTING, InboundStep.FAIL): InboundState.QUIET,
    (InboundState.CONNECTING, InboundStep.QUIET): InboundState.QUIET,
    (InboundState.ASKING, InboundStep.LINKED): InboundState.OFFERED,
    (InboundState.ASKING, InboundStep.FAIL): InboundState.QUIET,
    (InboundState.ASKING, InboundStep.QUIET): InboundState.QUIET,
    (InboundState.OFFERED, InboundStep.ACCEPTED): InboundState.ACCEPTED,
    (InboundState.OFFERED, InboundStep.CLOSED): InboundState.CLOSED,
    (InboundState.OFFERED, InboundStep.FAIL): InboundState.DRAINING,
    (InboundState.OFFERED, InboundStep.QUIET): InboundState.QUIET,
    (InboundState.ACCEPTED, InboundStep.ACCEPTED): InboundState.ACCEPTED,
    (InboundState.ACCEPTED, InboundStep.CLOSED): InboundState.CLOSED,
    (InboundState.ACCEPTED, InboundStep.FAIL): InboundState.DRAINING,
    (InboundState.ACCEPTED, InboundStep.QUIET): InboundState.QUIET,
    (InboundState.CLOSED, InboundStep.ACCEPTED): InboundState.CLOSED,
    (InboundState.CLOSED, InboundStep.CLOSED): InboundState.CLOSED,
    (InboundState.CLOSED, InboundStep.FAIL): InboundState.DRAINING,
    (InboundState.CLOSED, InboundStep.QUIET): InboundState.QUIET,
    (InboundState.DRAINING, InboundStep.ACCEPTED): InboundState.DRAINING,
    (InboundState.DRAINING, InboundStep.CLOSED): InboundState.DRAINING,
    (InboundState.DRAINING, InboundStep.QUIET): InboundState.QUIET,
    (InboundState.QUIET, InboundStep.FAIL): InboundState.QUIET,
    (InboundState.QUIET, InboundStep.QUIET): InboundState.QUIET,
}


class RoomState(StrEnum):
    """State of a source's room."""

    EARLY = "early"
    WARNED = "warned"
    OPEN = "open"
    FINISHED = "finished"
    FAILING = "failing"
    OVER = "over"


class SourceRoomStep(StrEnum):
    """Transition of a source's room."""

    OFFER = "Offer received"
    OPEN = "engine opens it"
    FINISH = "engine has pushed everything"
    FAIL = "abort, deadline, peer lost, write failed"
    DRAIN = "last write ended, some target sent nothing"


SOURCE_ROOM: dict[tuple[RoomState, SourceRoomStep], RoomState] = {
    (RoomState.EARLY, SourceRoomStep.OFFER): RoomState.EARLY,
    (RoomState.EARLY, SourceRoomStep.OPEN): RoomState.OPEN,
    (RoomState.EARLY, SourceRoomStep.FAIL): RoomState.WARNED,
    (RoomState.WARNED, SourceRoomStep.OFFER): RoomState.EARLY,
    (RoomState.WARNED, SourceRoomStep.OPEN): RoomState.FAILING,
    (RoomState.OPEN, SourceRoomStep.OFFER): RoomState.OPEN,
    (RoomState.OPEN, SourceRoomStep.FINISH): RoomState.FINISHED,
    (RoomState.OPEN, SourceRoomStep.FAIL): RoomState.FAILING,
    (RoomState.FINISHED, SourceRoomStep.OFFER): RoomState.FINISHED,
    (RoomState.FINISHED, SourceRoomStep.FAIL): RoomState.FAILING,
    (RoomState.FAILING, SourceRoomStep.DRAIN): RoomState.OVER,
    (RoomState.OVER, SourceRoomStep.OPEN): RoomState.OPEN,
}


class OutboundState(StrEnum):
    """State of an outbound transfer."""

    SENDING = "sending"
    CLOSED = "closed"
    DRAINING = "draining"


class OutboundStep(StrEnum):
    """Transition of an outbound transfer."""

    CLOSE = "everything written, Close sent"
    FAIL = "room fails"


OUTBOUND: dict[tuple[OutboundState, OutboundStep], OutboundState] = {
    (OutboundState.SENDING, OutboundStep.CLOSE): OutboundState.CLOSED,
    (OutboundState.SENDING, OutboundStep.FAIL): OutboundState.DRAINING,
    (OutboundState.CLOSED, OutboundStep.FAIL): OutboundState.DRAINING,
}


def advance(table: Mapping[tuple[S, T], S], state: S, step: T) -> S:
    """Return the next state. A transition missing from the table is a bug in kvferry."""
    try:
        return table[state, step]
    except KeyError:
        raise AssertionError(f"no step {step!r} from state {state!r}") from None
