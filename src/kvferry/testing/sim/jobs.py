"""Jobs: the requests that are played."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.ids import Room
from kvferry.layout.intervals import Span
from kvferry.plan.plan import Request


@dataclass(frozen=True)
class SimJob:
    """One request: its room, what prefill will push, and which decode wants it."""

    room: Room
    number: int
    request: Request
    chunks: tuple[Span, ...]
    decode: str
    deadline_s: float
    metadata: bytes
    probe: bool = False

    @property
    def digest(self) -> bytes:
        """What tells this request from another, whatever room it was given."""
        return f"request {self.number}".encode()
