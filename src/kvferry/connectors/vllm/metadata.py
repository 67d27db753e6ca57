"""Orders: what the scheduler's part tells every worker's in a step, as values. Pure.

A step's orders reach all ranks alike. They name requests and rooms, tokens and vLLM's blocks;
each rank knows by itself what of that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry import Room

# A request's blocks, or some of them, in each of vLLM's cache groups; where that holds recurrent
# state, the one block that has it.
BlocksByGroup = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OpenRoom:
    """A request's prompt of so many tokens is about to be computed here, for that room."""

    request: str
    room: Room
    tokens: int


@dataclass(frozen=True)
class PushTokens:
    """After this step the request's tokens are computed up to ``end``.

    ``blocks`` are its blocks from number ``first_block`` on. With the prompt's last token,
    ``digest`` says what was computed, and the room is closed.
    """

    room: Room
    end: int
    first_block: int
    blocks: BlocksByGroup
    digest: bytes | None = None


@dataclass(frozen=True)
class ReceiveRoom:
    """Have ``tokens`` tokens of a request written into its blocks, but for those in ``prefix``.

    Without ``blocks`` all of it is cached here: nothing is written, and prefill learns that.
    """

    request: str
    room: Room
    prefill: str
    tokens: int
    prefix: int
    blocks: BlocksByGroup
    digest: bytes


@dataclass
class PrefillMetadata:
    """What a step says to sources."""

    opened: list[OpenRoom] = field(default_factory=list)
    pushed: list[PushTokens] = field(default_factory=list)
    # Rooms whose blocks are gone, or will never be complete.
    abandoned: list[Room] = field(default_factory=list)
    # Finished requests whose blocks wait until their room is released.
    held: list[tuple[str, Room]] = field(default_factory=list)


@dataclass
class DecodeMetadata:
    """What a step says to targets."""

    received: list[ReceiveRoom] = field(default_factory=list)
    # Rooms that nobody will receive, each with its prefill instance.
    declined: list[tuple[Room, str]] = field(default_factory=list)
    # Requests that nobody waits for any more.
    aborted: list[str] = field(default_factory=list)
