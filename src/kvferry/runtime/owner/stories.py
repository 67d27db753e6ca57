"""Stories of an endpoint's last rooms: what happened, written down beside it, told when asked for.

Writing a step down is done for every frame, so it costs a look-up and four places in the list of
its room (``step_lists``). Nothing is kept that could be large. A room that goes on keeps its
steps, however many others end meanwhile. Of those that have ended, the last do, and the slowest
of the last minutes. Belongs to the owner's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import NamedTuple

from kvferry.ids import Peer, Room
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
from kvferry.runtime.owner.ended import EndedRoom, SlowRooms
from kvferry.runtime.owner.step_lists import HALF, WIDE, Steps, pack, shorten, story_of
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
OPENED, ASKED, OFFERED = Moment.OPENED, Moment.ASKED, Moment.OFFERED
PUSHED, FINISHED, WRITTEN = Moment.PUSHED, Moment.FINISHED, Moment.WRITTEN
GATHERED, SCATTERED = Moment.GATHERED, Moment.SCATTERED
DONE, FAILED, RELEASED = Moment.DONE, Moment.FAILED, Moment.RELEASED

MAX_FAILURES = 16
# Rooms that decode has offered pages for, and that prefill has not opened.
MAX_EARLY = 1024


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
    """Rooms that go on, and of those that have ended the last ``most_steps``; with 0 nothing.

    ``now`` is the time of what the owner takes: all that comes of it has that time.
    """

    def __init__(self, most_steps: int) -> None:
        self.now = monotonic()
        self._most_steps = most_steps
        # Of rooms that go on, have just ended, or have failed and are not forgotten.
        self._steps: dict[Room, Steps] = {}
        self._early: dict[Room, Steps] = {}
        # What has ended last: the word to its peers may still be written down.
        self._fresh: EndedRoom | None = None
        # The ended ones in two halves: the older is forgotten at once, which is cheap.
        self._older: list[EndedRoom] = []
        self._newer: list[EndedRoom] = []
        self._num_newer = 0
        self.slow = SlowRooms()
        self.failures: deque[FailedRoom] = deque(maxlen=min(MAX_FAILURES, most_steps))
        # Bytes that were written to each peer, by path.
        self.sent: dict[Peer, dict[Path, int]] = {}

    # ------------------------------------------------------------ what happens

    def heard(self, envelope: Envelope) -> bool:
        """From a peer; whether it was about a room."""
        body = envelope.body
        moment = MESSAGES.get(body.__class__)
        if moment is None:
            return False
        steps = self._steps.get(body.room)  # type: ignore[union-attr]
        if steps is not None:
            steps += (self.now, moment, envelope.sender, True)
        elif moment is OFFERED and self._most_steps:
            self._heard_early(body.room, envelope.sender)  # type: ignore[union-attr]
        return True

    def _heard_early(self, room: Room, peer: Peer) -> None:
        """An offer for a room that is not open."""
        if len(self._early) >= MAX_EARLY:
            del self._early[next(iter(self._early))]
        self._early.setdefault(room, []).extend((self.now, OFFERED, peer, True))

    def said(self, peer: Peer, envelope: Envelope) -> None:
        """To a peer."""
        body = envelope.body
        moment = MESSAGES.get(body.__class__)
        if moment is not None:
            steps = self._steps.get(body.room)  # type: ignore[union-attr]
            if steps is not None:
                steps += (self.now, moment, peer, False)

    def asked(self, event: Event, handle: Handle) -> None:
        """By the engine."""
        kind, steps = event.__class__, handle.told
        if kind is Push:
            if steps is not None:
                steps += (self.now, PUSHED, None, event.tokens)  # type: ignore[attr-defined]
        elif kind is Finish:
            if steps is not None:
                steps += (self.now, FINISHED, None, None)
        elif self._most_steps and (kind is Open or kind is Receive):
            self._begin(handle, OPENED if kind is Open else ASKED)

    def _begin(self, handle: Handle, moment: Moment) -> Steps:
        room, first = handle.room, (handle.begun, moment, handle.tag, None)
        early = self._early.pop(room, None) if self._early else None
        self._steps[room] = handle.told = steps = [*first, *early] if early else list(first)
        return steps

    def wrote(
        self, handle: Handle | None, peer: Peer, path: Path, num_bytes: int, seconds: float
    ) -> None:
        """A write has ended well."""
        paths = self.sent.get(peer)
        if paths is None:
            paths = self.sent[peer] = dict.fromkeys(Path, 0)
        paths[path] += num_bytes
        # It may have been made just now; what is said of it comes after it.
        self.now = now = monotonic()
        if handle is not None and handle.told is not None:
            handle.told += (now, WRITTEN, peer, (seconds, num_bytes, path))

    def copied(self, room: Room, moment: Moment, peer: Peer, ended: float, took: Took) -> None:
        """A gather or a scatter has ended."""
        steps = self._steps.get(room)
        if steps is not None:
            steps += (ended, moment, peer, took)

    def ended(self, handle: Handle, outcome: Outcome) -> None:
        """For its engine."""
        if not self._most_steps:
            return
        steps, now = handle.told, self.now
        if steps is None:
            # It never came to the machine.
            steps = self._begin(handle, ASKED)
        failed = isinstance(outcome, Failure)
        steps += (now, FAILED, None, outcome) if failed else (now, DONE, None, None)
        if len(steps) > 2 * HALF:
            shorten(steps)
        seconds, slow = now - handle.begun, self.slow
        ended: EndedRoom = (now, seconds, handle.room, steps)
        if seconds > slow.least_s or now >= slow.until:
            slow.add(ended)
        if isinstance(outcome, Failure):
            self.failures.append(FailedRoom(now, handle.room, outcome, handle.tag))
            # As it is: when its memory is released may be told much later.
            self._keep(ended, len(steps))
            return
        if self._fresh is not None:
            self._pack(*self._fresh)
        self._fresh = ended

    def _pack(self, at: float, seconds: float, room: Room, steps: Steps | bytes) -> None:
        if self._steps.get(room) is steps:
            del self._steps[room]
        self._keep((at, seconds, room, pack(steps)), len(steps))

    def _keep(self, ended: EndedRoom, num_places: int) -> None:
        self._newer.append(ended)
        self._num_newer += num_places
        if self._num_newer > self._most_steps * WIDE // 2:
            self._forget_older()

    def _forget_older(self) -> None:
        kept = self._steps
        for _, _, room, steps in self._older:
            if kept.get(room) is steps:
                del kept[room]
        self._older, self._newer, self._num_newer = self._newer, [], 0

    def released(self, room: Room) -> None:
        """After a failure, when proof has come; what is done is released at once."""
        steps = self._steps.get(room)
        if steps is not None:
            steps += (self.now, RELEASED, None, None)

    def tidy(self) -> None:
        """Now and then: rooms with very many chunks keep their beginning and their end."""
        for steps in self._steps.values():
            if len(steps) > 4 * HALF:
                shorten(steps)

    # ------------------------------------------------------------ what is known

    def stories(self, endpoint: Peer, role: str, names: Iterable[str]) -> Iterator[RoomStory]:
        """What is known of rooms by their names; nothing of those that are forgotten."""
        wanted = set(names)
        if not wanted:
            return
        known: dict[Room, Steps | bytes] = {room: steps for _, _, room, steps in self.slow}
        known |= {room: steps for _, _, room, steps in (*self._older, *self._newer)} | self._steps
        for room, steps in known.items():
            if str(room) in wanted:
                yield story_of(str(endpoint), role, room, steps)

    def ended_since(self, endpoint: Peer, role: str, since: float) -> list[RoomStory]:
        """The stories of rooms that ended since then, as far as they are kept."""
        ended = [*self._older, *self._newer]
        if self._fresh is not None:
            ended.append(self._fresh)
        late = [(room, steps) for at, _, room, steps in ended if at >= since]
        return [story_of(str(endpoint), role, room, steps) for room, steps in late]

    def forget_peers(self, known: set[Peer]) -> None:
        """Nobody asks what was sent to any other."""
        for peer in self.sent.keys() - known:
            del self.sent[peer]
