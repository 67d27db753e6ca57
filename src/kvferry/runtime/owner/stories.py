"""Stories of an endpoint's last rooms: what happened, written down beside it, told when asked for.

It is written down for every frame, so it costs five places in the ``journal`` and nothing else.
Nothing is kept that could be large. A room that goes on keeps its steps, however many others end
meanwhile, and so do those that failed last. Of those that have ended, the last do, and the
slowest of the last minutes. Belongs to the owner's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import NamedTuple

from kvferry.ids import MAX_ID, Peer, Room
from kvferry.layout.intervals import Span
from kvferry.observe.steps import Moment, RoomStory
from kvferry.plan.choose import Path
from kvferry.protocol.messages import Envelope, RoomMessage
from kvferry.protocol.outcome import Failure, Outcome
from kvferry.runtime.bundles import Bundle
from kvferry.runtime.handles import Handle
from kvferry.runtime.owner.ended import SlowRooms
from kvferry.runtime.owner.journal import MESSAGES, Journal, Page
from kvferry.runtime.owner.telling import (
    Setting,
    Steps,
    Teller,
    ended_attempt,
    last_end,
    present_attempt,
)
from kvferry.runtime.telemetry.tags import RoomTag

# Members of an enumeration are slow to name.
PUSHED, WRITTEN, GATHERED = Moment.PUSHED, Moment.WRITTEN, Moment.GATHERED
SCATTERED, DONE, FAILED, RELEASED = (
    Moment.SCATTERED,
    Moment.DONE,
    Moment.FAILED,
    Moment.RELEASED,
)

MAX_FAILURES = 16


@dataclass(slots=True)
class FailedRoom:
    """Why a room failed, and until when anything was written of it."""

    at: float
    room: Room
    failure: Failure
    tag: RoomTag
    begun: float
    until: float


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

    def heard(self, envelope: Envelope) -> None:
        """What came alone."""
        if self.keeps and isinstance(envelope.body, RoomMessage):
            self.now = now = monotonic()
            self._write(now, envelope.body, envelope.sender, True)

    def heard_together(self, message: Bundle) -> None:
        """All that came with one message."""
        if self.keeps:
            self.now = now = monotonic()
            self._journal.write_message(now, None, message)

    def said(self, peer: Peer, body: RoomMessage) -> None:
        """What leaves alone."""
        if self.keeps:
            self._write(self.now, body, peer, False)

    def said_together(self, peer: Peer, message: Bundle) -> None:
        """All that leaves with one message."""
        if self.keeps:
            self._journal.write_message(self.now, peer, message)

    def _write(self, at: float, body: RoomMessage, peer: Peer, is_heard: bool) -> None:
        self._journal.open += (at, MESSAGES[body.__class__], body.room, peer, is_heard)

    def pushed(self, room: Room, tokens: Span) -> None:
        """By the engine."""
        if self.keeps:
            self._journal.open += (self.now, PUSHED, room, None, tokens)

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
        handle.told = True
        now, room, begun = self.now, handle.room, handle.begun
        if isinstance(outcome, Failure):
            why = f"{outcome.code}: {outcome.message}"[:1000].encode(errors="replace").decode()
            more = begun, handle.finished, why
            self._journal.open += (now, FAILED, room, handle.tag, more)
            self.failures.append(FailedRoom(now, room, outcome, handle.tag, begun, now))
        else:
            self._journal.open += (now, DONE, room, handle.tag, (begun, handle.finished, None))
        seconds, slow = now - begun, self.slow
        if seconds > slow.least_s or now >= slow.until:
            slow.add((now, seconds, room, handle.tag))

    def released(self, room: Room) -> None:
        """After a failure, when proof has come; what is done is released at once."""
        if self.keeps:
            self._journal.open += (self.now, RELEASED, room, None, None)
            for one in self.failures:
                if one.room == room:
                    one.until = self.now

    # ------------------------------------------------------------ pages

    @property
    def is_full(self) -> bool:
        """Whether a page should be turned."""
        return self._journal.is_full

    def turn_page(self, held: Collection[Handle], early: set[Room]) -> None:
        """After a turn. Rooms are held until they are over; early ones peers have offered."""
        page = self._journal.turn_page(self.now, early)
        if page is not None:
            kept = early.union((one.room for one in held), self.slow.rooms)
            kept.update(one.room for one in self.failures)
            self._journal.forget(page, kept, self._told_in(page, held) | (page.early & kept))

    def _told_in(self, page: Page, held: Collection[Handle]) -> set[Room]:
        """The rooms to keep of which that page may tell, by when they began and ended."""
        since, until = page.since, page.until
        found = {one.room for one in held if one.begun <= until}
        found.update(room for at, took, room, _ in self.slow if at >= since and at - took <= until)
        found.update(one.room for one in self.failures if one.until >= since and one.begun <= until)
        return found

    # ------------------------------------------------------------ what is known

    def stories(
        self, teller: Teller, names: Iterable[str], held: Callable[[Room], Handle | None]
    ) -> Iterator[RoomStory]:
        """What is known of rooms by their names; nothing of those that are forgotten."""
        rooms = set(chain.from_iterable(map(_meant, names)))
        if rooms:
            known = self._journal.told(rooms)
            for room in rooms:
                story = self._story(teller, room, known.get(room, []), held(room))
                if story is not None:
                    yield story

    def ended_since(self, teller: Teller, since: float) -> list[RoomStory]:
        """The stories of rooms that ended since then, as far as they are kept."""
        known = self._journal.told(self._journal.ended_since(since))
        stories = (self._story(teller, room, steps, None) for room, steps in known.items())
        return [story for story in stories if story is not None]

    def _story(
        self, teller: Teller, room: Room, steps: Steps, handle: Handle | None
    ) -> RoomStory | None:
        if handle is not None and not handle.told:
            setting = Setting(handle.tag, handle.begun, handle.finished)
            return teller.story(room, present_attempt(steps), setting)
        end = last_end(steps)
        if end is None:
            return None
        since, setting = ended_attempt(steps, end)
        whole = self._journal.knows_since(room, setting.begun)
        return teller.story(room, since, setting) if whole else None

    def forget_peers(self, known: set[Peer]) -> None:
        """Nobody asks what was sent to any other."""
        for peer in self.sent.keys() - known:
            del self.sent[peer]


def _meant(name: str) -> tuple[Room, ...]:
    """The rooms that have that name: a text, and the number that it is."""
    is_number = len(name) <= len(str(MAX_ID)) and name.isascii() and name.isdecimal()
    return (name, int(name)) if is_number and str(int(name)) == name else (name,)
