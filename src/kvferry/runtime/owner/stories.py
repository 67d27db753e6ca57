"""Stories of an endpoint's last rooms: what happened, written down beside it, told when asked for.

Writing a step down is done for every frame, so it costs five places in the ``journal`` and
nothing else. Nothing is kept that could be large. A room that goes on keeps its steps, however
many others end meanwhile, and so do those that failed last. Of those that have ended, the last
do, and the slowest of the last minutes. Belongs to the owner's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import NamedTuple

from kvferry.ids import Peer, Room
from kvferry.layout.intervals import Span
from kvferry.observe.steps import Moment, RoomStory
from kvferry.plan.choose import Path
from kvferry.protocol.events import Event, Finish, Open, Push, Receive
from kvferry.protocol.messages import (
    Abort,
    Accept,
    Arrived,
    Close,
    Complete,
    Drained,
    Envelope,
    Grant,
    Nudge,
    Offer,
    Want,
)
from kvferry.protocol.outcome import Failure, Outcome
from kvferry.runtime.handles import Handle
from kvferry.runtime.owner.ended import SlowRooms
from kvferry.runtime.owner.journal import Choice, Journal, story_of
from kvferry.runtime.telemetry.tags import RoomTag

MESSAGES: dict[type, Moment] = {
    Offer: Moment.OFFERED,
    Accept: Moment.ACCEPTED,
    Want: Moment.WANTED,
    Grant: Moment.GRANTED,
    Arrived: Moment.ARRIVED,
    Nudge: Moment.NUDGED,
    Close: Moment.CLOSED,
    Complete: Moment.COMPLETED,
    Abort: Moment.ABORTED,
    Drained: Moment.DRAINED,
}
# Members of an enumeration are slow to name.
OPENED, ASKED = Moment.OPENED, Moment.ASKED
PUSHED, FINISHED, WRITTEN = Moment.PUSHED, Moment.FINISHED, Moment.WRITTEN
GATHERED, SCATTERED = Moment.GATHERED, Moment.SCATTERED
DONE, FAILED, RELEASED = Moment.DONE, Moment.FAILED, Moment.RELEASED

MAX_FAILURES = 16


class FailedRoom(NamedTuple):
    """Why a room failed."""

    at: float
    room: Room
    failure: Failure
    tag: RoomTag


class Took(NamedTuple):
    """How long a step took, what it carried, and how."""

    seconds: float
    num_bytes: int = 0
    path: str = ""


class StoryBook:
    """Rooms that go on, and of those that have ended what the last ``most_steps`` steps tell.

    With 0 nothing is kept. ``now`` is the time of what the owner takes: all that comes of it
    has that time.
    """

    def __init__(self, most_steps: int) -> None:
        self.now = monotonic()
        # Whether steps are written down at all.
        self.keeps = most_steps > 0
        self._journal = Journal(most_steps)
        self.slow = SlowRooms()
        self.failures: deque[FailedRoom] = deque(maxlen=MAX_FAILURES)
        # Bytes that were written to each peer, by path.
        self.sent: dict[Peer, dict[Path, int]] = {}

    # ------------------------------------------------------------ what happens

    def heard(self, envelope: Envelope) -> bool:
        """From a peer; whether it was about a room."""
        body = envelope.body
        moment = MESSAGES.get(body.__class__)
        if moment is None:
            return False
        if self.keeps:
            room: Room = body.room  # type: ignore[union-attr]
            self._journal.open += (self.now, moment, room, envelope.sender, True)
        return True

    def said(self, peer: Peer, envelope: Envelope) -> None:
        """To a peer."""
        if self.keeps:
            body = envelope.body
            moment = MESSAGES.get(body.__class__)
            if moment is not None:
                room: Room = body.room  # type: ignore[union-attr]
                self._journal.open += (self.now, moment, room, peer, False)

    def asked(self, event: Event, handle: Handle) -> None:
        """By the engine."""
        if self.keeps:
            kind, room = event.__class__, handle.room
            if kind is Push:
                tokens: Span = event.tokens  # type: ignore[attr-defined]
                self._journal.open += (self.now, PUSHED, room, None, tokens)
            elif kind is Finish:
                self._journal.open += (self.now, FINISHED, room, None, None)
            elif kind is Open or kind is Receive:
                self._begin(handle, OPENED if kind is Open else ASKED)

    def _begin(self, handle: Handle, moment: Moment) -> None:
        handle.told = True
        self._journal.open += (handle.begun, moment, handle.room, handle.tag, None)

    def wrote(self, room: Room, peer: Peer, path: Path, num_bytes: int, seconds: float) -> None:
        """A write has ended well."""
        paths = self.sent.get(peer)
        if paths is None:
            paths = self.sent[peer] = dict.fromkeys(Path, 0)
        paths[path] += num_bytes
        # It may have been made just now; what is said of it comes after it.
        self.now = now = monotonic()
        if self.keeps:
            self._journal.open += (now, WRITTEN, room, peer, (seconds, num_bytes, path))

    def copied(self, room: Room, moment: Moment, peer: Peer, ended: float, took: Took) -> None:
        """A gather or a scatter has ended."""
        if self.keeps:
            self._journal.open += (ended, moment, room, peer, took)

    def ended(self, handle: Handle, outcome: Outcome) -> None:
        """For its engine."""
        if not self.keeps:
            return
        now, room = self.now, handle.room
        if not handle.told:
            # It never came to the machine.
            self._begin(handle, ASKED)
        if isinstance(outcome, Failure):
            why = f"{outcome.code}: {outcome.message}"[:1000].encode(errors="replace").decode()
            self._journal.open += (now, FAILED, room, None, why)
            self.failures.append(FailedRoom(now, room, outcome, handle.tag))
        else:
            self._journal.open += (now, DONE, room, None, None)
        seconds, slow = now - handle.begun, self.slow
        if seconds > slow.least_s or now >= slow.until:
            slow.add((now, seconds, room, handle.tag))

    def released(self, room: Room) -> None:
        """After a failure, when proof has come; what is done is released at once."""
        if self.keeps:
            self._journal.open += (self.now, RELEASED, room, None, None)

    def tidy(self, held: Choice) -> None:
        """After every turn. ``held`` chooses the rooms that are not over."""
        if self._journal.is_full:
            others = self.slow.rooms.union(one.room for one in self.failures)
            self._journal.turn_page(lambda rooms: held(rooms) | (others & rooms))

    # ------------------------------------------------------------ what is known

    def stories(self, endpoint: Peer, role: str, names: Iterable[str]) -> Iterator[RoomStory]:
        """What is known of rooms by their names; nothing of those that are forgotten."""
        wanted = set(names)
        if wanted:
            known = self._journal.told(lambda room: str(room) in wanted)
            for room, steps in known.items():
                yield story_of(str(endpoint), role, room, steps)

    def ended_since(self, endpoint: Peer, role: str, since: float) -> list[RoomStory]:
        """The stories of rooms that ended since then, as far as they are kept."""
        known = self._journal.ended_since(since)
        return [story_of(str(endpoint), role, room, steps) for room, steps in known.items()]

    def forget_peers(self, known: set[Peer]) -> None:
        """Nobody asks what was sent to any other."""
        for peer in self.sent.keys() - known:
            del self.sent[peer]
