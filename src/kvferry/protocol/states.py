"""Every state and every legal step, as literal tables.

**A link** is what one endpoint knows of one peer in one session. A target
starts it with Hello and it is *up* once Welcome has come and fits; a source's
link is up once the target has answered the Welcome. A link is *lost* when the peer is silent, has
restarted or refuses. Lost is not proof of anything: memory that the peer may
still write waits until it is *gone*, which the transport says once the
connection is torn down and nothing can land any more.

**A inbound** is what a target expects from one source in one room. It is
*connecting* until the link is up, *offered* once the Offer is out, *accepted*
when the source has answered, *closed* when it has said that all is written.
Whatever fails the room makes each inbound *draining*: the source was told to stop
and its answer is awaited. *Quiet* means proof: this source writes nothing more
for this room. A inbound that was never offered is quiet at once.

**A source's room** is *early* while only offers for it have come, and *warned*
if they were taken back before the engine opened it; both expire. It is *open*
once the engine has opened it, *finished* when the engine has pushed everything,
and *failing* from the moment anything goes wrong until its last write has ended.
If some target has not been heard of by then, the room is kept as *over* for a
while, so that a late offer is refused at once; that expires too.

**A outbound** is what a source owes one target in one room. It is *sending* until
everything is written, *closed* while the target's Complete is awaited, and
*draining* while writes of a failed room are still in flight.

An end state is not in the tables: what has ended is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


class LinkState(StrEnum):
    """What is known of a peer."""

    GREETING = "greeting"
    UP = "up"
    LOST = "lost"
    GONE = "gone"


class LinkStep(StrEnum):
    """What changes a link."""

    FITS = "Welcome fits, or was answered"
    LOSE = "silent, restarted, refused"
    GONE = "connection torn down"


LINK: dict[tuple[LinkState, LinkStep], LinkState] = {
    (LinkState.GREETING, LinkStep.FITS): LinkState.UP,
    (LinkState.GREETING, LinkStep.LOSE): LinkState.LOST,
    (LinkState.UP, LinkStep.LOSE): LinkState.LOST,
    (LinkState.LOST, LinkStep.GONE): LinkState.GONE,
}


class InboundState(StrEnum):
    """Where a target's expectation of one source stands."""

    CONNECTING = "connecting"
    OFFERED = "offered"
    ACCEPTED = "accepted"
    CLOSED = "closed"
    DRAINING = "draining"
    QUIET = "quiet"


class InboundStep(StrEnum):
    """What changes a inbound."""

    LINKED = "link is up, Offer sent"
    ACCEPTED = "Accept or any note came"
    CLOSED = "Close came"
    FAIL = "room fails, Abort sent"
    QUIET = "Drained came, or peer gone"


INBOUND: dict[tuple[InboundState, InboundStep], InboundState] = {
    (InboundState.CONNECTING, InboundStep.LINKED): InboundState.OFFERED,
    (InboundState.CONNECTING, InboundStep.FAIL): InboundState.QUIET,
    (InboundState.CONNECTING, InboundStep.QUIET): InboundState.QUIET,
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
    """Where a source's room stands."""

    EARLY = "early"
    WARNED = "warned"
    OPEN = "open"
    FINISHED = "finished"
    FAILING = "failing"
    OVER = "over"


class RoomStep(StrEnum):
    """What changes a source's room."""

    OFFER = "Offer came"
    OPEN = "engine opens it"
    FINISH = "engine has pushed everything"
    FAIL = "abort, deadline, peer lost, write failed"
    DRAIN = "last write ended, some target unheard"


SOURCE_ROOM: dict[tuple[RoomState, RoomStep], RoomState] = {
    (RoomState.EARLY, RoomStep.OFFER): RoomState.EARLY,
    (RoomState.EARLY, RoomStep.OPEN): RoomState.OPEN,
    (RoomState.EARLY, RoomStep.FAIL): RoomState.WARNED,
    (RoomState.WARNED, RoomStep.OFFER): RoomState.EARLY,
    (RoomState.WARNED, RoomStep.OPEN): RoomState.FAILING,
    (RoomState.OPEN, RoomStep.OFFER): RoomState.OPEN,
    (RoomState.OPEN, RoomStep.FINISH): RoomState.FINISHED,
    (RoomState.OPEN, RoomStep.FAIL): RoomState.FAILING,
    (RoomState.FINISHED, RoomStep.OFFER): RoomState.FINISHED,
    (RoomState.FINISHED, RoomStep.FAIL): RoomState.FAILING,
    (RoomState.FAILING, RoomStep.DRAIN): RoomState.OVER,
    (RoomState.OVER, RoomStep.OPEN): RoomState.OPEN,
}


class OutboundState(StrEnum):
    """Where a source's duty to one target stands."""

    SENDING = "sending"
    CLOSED = "closed"
    DRAINING = "draining"


class OutboundStep(StrEnum):
    """What changes a outbound."""

    CLOSE = "all is written, Close sent"
    FAIL = "room fails"


OUTBOUND: dict[tuple[OutboundState, OutboundStep], OutboundState] = {
    (OutboundState.SENDING, OutboundStep.CLOSE): OutboundState.CLOSED,
    (OutboundState.SENDING, OutboundStep.FAIL): OutboundState.DRAINING,
    (OutboundState.CLOSED, OutboundStep.FAIL): OutboundState.DRAINING,
}


def advance(table: Mapping[tuple[S, T], S], state: S, step: T) -> S:
    """The next state. A step that the table does not have is a bug of ours."""
    try:
        return table[state, step]
    except KeyError:
        raise AssertionError(f"no step {step!r} from state {state!r}") from None
