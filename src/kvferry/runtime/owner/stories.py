"""Stories of an endpoint's last rooms: one ring of tuples, made into values when asked for.

Writing a step down costs little more than a tuple, because it is done for every frame: nothing
is looked up by room, and nothing is kept that could be large or that Python's collector would
have to look at (numbers and plain texts only). The ring has so many steps, of whichever rooms
were last. Belongs to the owner's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import nlargest
from time import monotonic
from typing import Any, NamedTuple

from kvferry.ids import Peer, Room
from kvferry.observe.steps import MAX_STORY_STEPS, Moment, RoomStory, StoryStep
from kvferry.plan.choose import Path
from kvferry.protocol.events import Event, Finish, Open, Push, Receive, Received
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
from kvferry.runtime.telemetry.tags import NOBODYS, RoomTag

# Plain texts, and no members of an enumeration.
EVENTS: dict[type, str] = {
    Open: Moment.OPENED.value,
    Receive: Moment.ASKED.value,
    Push: Moment.PUSHED.value,
    Finish: Moment.FINISHED.value,
}
MESSAGES: dict[type, str] = {
    Offer: Moment.OFFERED.value,
    Accept: Moment.ACCEPTED.value,
    Want: Moment.WANTED.value,
    Grant: Moment.GRANTED.value,
    Arrived: Moment.ARRIVED.value,
    Nudge: Moment.NUDGED.value,
    Close: Moment.CLOSED.value,
    Complete: Moment.COMPLETED.value,
    Abort: Moment.ABORTED.value,
    Drained: Moment.DRAINED.value,
}
WRITTEN, GATHERED = Moment.WRITTEN.value, Moment.GATHERED.value
SCATTERED = Moment.SCATTERED.value
DONE, FAILED, RELEASED = Moment.DONE.value, Moment.FAILED.value, Moment.RELEASED.value
MAX_FAILURES, MAX_ENDED = 16, 1024


class EndedRoom(NamedTuple):
    """A room that ended at ``at``, ``seconds`` after it began."""

    at: float
    seconds: float
    room: Room
    tag: RoomTag


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
    """The last ``most_steps`` steps; with 0 nothing is kept."""

    def __init__(self, most_steps: int) -> None:
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=most_steps)
        self._append = self._ring.append
        self._ended: deque[EndedRoom] = deque(maxlen=min(MAX_ENDED, most_steps))
        self.failures: deque[FailedRoom] = deque(maxlen=min(MAX_FAILURES, most_steps))
        # Bytes that were written to each peer, by path.
        self.sent: dict[Peer, dict[Path, int]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    # ------------------------------------------------------------ what happens

    def heard(self, event: Event) -> bool:
        """From a peer; whether it was about a room."""
        if event.__class__ is Received:
            envelope: Envelope = event.envelope
            body = envelope.body
            moment = MESSAGES.get(body.__class__)
            if moment is not None:
                room = body.room  # type: ignore[union-attr]
                peer = envelope.sender
                self._append((monotonic(), room, moment, peer.instance, peer.rank, True))
                return True
        return False

    def said(self, peer: Peer, envelope: Envelope) -> None:
        """To a peer."""
        body = envelope.body
        moment = MESSAGES.get(body.__class__)
        if moment is not None:
            room = body.room  # type: ignore[union-attr]
            self._append((monotonic(), room, moment, peer.instance, peer.rank))

    def asked(self, event: Any, tag: RoomTag = NOBODYS) -> None:
        """By the engine."""
        moment = EVENTS.get(event.__class__)
        if moment is not None:
            if event.__class__ is Push:
                tokens = event.tokens
                self._append((monotonic(), event.room, moment, tokens.first, tokens.end))
            else:
                self._append((monotonic(), event.room, moment, *tag))

    def wrote(self, room: Room, peer: Peer, path: Path, num_bytes: int, seconds: float) -> None:
        """A write has ended well."""
        paths = self.sent.get(peer)
        if paths is None:
            paths = self.sent[peer] = {}
        paths[path] = paths.get(path, 0) + num_bytes
        who = peer.instance, peer.rank, False
        self._append((monotonic(), room, WRITTEN, *who, seconds, num_bytes, _PLAIN[path]))

    def copied(self, room: Room, moment: str, peer: Peer, ended: float, took: Took) -> None:
        """A gather or a scatter has ended."""
        who = peer.instance, peer.rank, False
        self._append((ended, room, moment, *who, *took))

    def ended(self, room: Room, outcome: Outcome, begun: float, tag: RoomTag) -> None:
        """For its engine."""
        now = monotonic()
        if isinstance(outcome, Failure):
            self.failures.append(FailedRoom(now, room, outcome, tag))
            self._append((now, room, FAILED, f"{outcome.code}: {outcome.message}"))
        else:
            self._append((now, room, DONE))
        self._ended.append(EndedRoom(now, now - begun, room, tag))

    def released(self, room: Room) -> None:
        """After a failure, when proof has come; what is done is released at once."""
        self._append((monotonic(), room, RELEASED))

    # ------------------------------------------------------------ what is known

    def stories(self, endpoint: Peer, role: str, names: Iterable[str]) -> Iterator[RoomStory]:
        """What is known of rooms by their names; nothing of those that are forgotten."""
        found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in names}
        for step in self._ring if found else ():
            steps = found.get(str(step[1]))
            if steps is not None:
                steps.append(step)
        for name, steps in found.items():
            if steps:
                yield _story(str(endpoint), role, name, steps)

    def ended_since(self, since: float) -> list[str]:
        """The rooms that ended since then, as far as they are remembered."""
        return [str(ended.room) for ended in self._since(since)]

    def slowest(self, since: float, most: int) -> list[EndedRoom]:
        """Of those that ended since then, the ones that took longest."""
        return nlargest(most, self._since(since), key=lambda ended: ended.seconds)

    def _since(self, since: float) -> Iterator[EndedRoom]:
        for ended in reversed(self._ended):
            if ended.at < since:
                return
            yield ended

    def forget_peers(self, known: set[Peer]) -> None:
        """Nobody asks what was sent to any other."""
        for peer in self.sent.keys() - known:
            del self.sent[peer]


def _story(endpoint: str, role: str, name: str, steps: list[tuple[Any, ...]]) -> RoomStory:
    """Of a room with very many chunks, its beginning and its end."""
    half = MAX_STORY_STEPS // 2
    kept = steps if len(steps) <= MAX_STORY_STEPS else [*steps[:half], *steps[-half:]]
    tags = [RoomTag(*step[3:]) for step in steps if step[2] in _TAGGED and len(step) > 3]
    tag = next((tag for tag in tags if tag != NOBODYS), NOBODYS)
    return RoomStory(
        endpoint=endpoint,
        role=role,
        room=name,
        steps=tuple(sorted(map(_step, kept), key=lambda step: step.at)),
        request=tag.request,
        traceparent=tag.traceparent,
        left_out=len(steps) - len(kept),
    )


def _step(raw: tuple[Any, ...]) -> StoryStep:
    """As a value: what stands behind the moment depends on it."""
    at, _, moment, *more = raw
    if moment == _PUSHED:
        return StoryStep(Moment.PUSHED, at, detail=f"tokens {more[0]} to {more[1]}")
    if moment == FAILED:
        return StoryStep(Moment.FAILED, at, detail=more[0][:1000])
    if moment in _TAGGED or not more:
        return StoryStep(Moment(moment), at)
    instance, rank, *rest = more
    return StoryStep(Moment(moment), at, f"{instance}/{rank}", *rest)


_PUSHED = Moment.PUSHED.value
_TAGGED = (Moment.OPENED.value, Moment.ASKED.value, Moment.FINISHED.value)
_PLAIN = {path: path.value for path in Path}
