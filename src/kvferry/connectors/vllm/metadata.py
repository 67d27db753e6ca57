"""Connector metadata of one step, from the scheduler to every worker, and a rank's report.

All ranks receive the same metadata. It names requests, rooms, tokens and vLLM's block ids; each
rank derives the part that it holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry import PrefixChain, Room

# Block ids of a request, per vLLM cache group. A group with recurrent state has one block.
BlocksByGroup = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OpenRoom:
    """The engine starts to prefill a prompt of ``tokens`` tokens for a room.

    ``is_late``: push the room when the request has ended. Its answer is what names the room to
    decode, or the prompt may have to be computed again, because a load in its first step failed.
    ``awaits_token``: close the room when the request has ended, with its first token.
    """

    request: str
    room: Room
    tokens: int
    is_late: bool = False
    awaits_token: bool = False


@dataclass(frozen=True)
class PushTokens:
    """This step computes the prompt up to token ``end``.

    ``blocks`` are the request's blocks from index ``first_block`` on. ``digest`` is set with the
    last token of the prompt, which closes the room.
    """

    room: Room
    end: int
    first_block: int
    blocks: BlocksByGroup
    digest: bytes | None = None


@dataclass(frozen=True)
class ReceiveRoom:
    """Receive the first ``tokens`` tokens of a prompt, except for the ``prefix`` cached here.

    Without ``blocks`` everything is cached: the room completes without data. ``is_computed``:
    prefill has answered, so that only the transfer is missing.
    """

    request: str
    room: Room
    prefill: str
    tokens: int
    prefix: int
    blocks: BlocksByGroup
    digest: bytes
    is_computed: bool = False


class HeldRoom(NamedTuple):
    """A finished request whose blocks are held until its room is released, and its first token."""

    request: str
    room: Room
    token: int | None = None


@dataclass
class PrefillMetadata:
    """Metadata for the sources of a rank."""

    opened: list[OpenRoom] = field(default_factory=list)
    pushed: list[PushTokens] = field(default_factory=list)
    # Rooms that lost their blocks or will never be complete. A decode may wait for them.
    abandoned: list[Room] = field(default_factory=list)
    # The same, for rooms that no decode knows.
    forgotten: list[Room] = field(default_factory=list)
    held: list[HeldRoom] = field(default_factory=list)


@dataclass
class DecodeMetadata:
    """Metadata for the targets of a rank.

    ``wait_s``: how long the step may wait for a room to end, because it computes nothing.
    """

    received: list[ReceiveRoom] = field(default_factory=list)
    # Rooms that will not be received, with their prefill instances.
    declined: list[tuple[Room, str]] = field(default_factory=list)
    # Requests whose rooms are to be aborted.
    aborted: list[str] = field(default_factory=list)
    wait_s: float = 0.0


class SendPrefix(NamedTuple):
    """Send a cached prefix, after the step, in a room that another instance waits for."""

    room: Room
    tokens: int
    blocks: BlocksByGroup
    digest: bytes
    deadline_s: float


class PullPrefix(NamedTuple):
    """Ask ``holder`` for a chain, of which the first ``prefix`` tokens are cached here."""

    room: Room
    holder: str
    chain: PrefixChain
    prefix: int
    blocks: BlocksByGroup


@dataclass
class PullMetadata:
    """Metadata for pulls of cached prefixes.

    ``address``: where the lead rank looks up what others ask for; None if nothing is held.
    """

    address: str | None = None
    sent: list[SendPrefix] = field(default_factory=list)
    asked: list[PullPrefix] = field(default_factory=list)
    aborted: list[Room] = field(default_factory=list)


@dataclass
class RankReport:
    """Results of a step for the scheduler: of one rank, or the sum over several.

    ``reasons``: why rooms failed, by request. ``pulled``: each rank's tokens of an ended pull, None
    after a failure.
    ``sent``, ``received``: on how many ranks a pull's room is released.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    pulled: dict[Room, list[int | None]] = field(default_factory=dict)
    sent: Counter[Room] = field(default_factory=Counter)
    received: Counter[Room] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.reasons or self.pulled or self.sent or self.received)

    def plus(self, other: RankReport) -> RankReport:
        """Return the sum. This one's reasons have priority."""
        rooms = self.pulled.keys() | other.pulled.keys()
        return RankReport(
            other.reasons | self.reasons,
            {room: self.pulled.get(room, []) + other.pulled.get(room, []) for room in rooms},
            self.sent + other.sent,
            self.received + other.received,
        )
