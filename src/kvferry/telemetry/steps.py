"""Steps of a room as one endpoint recorded them, and the room's tag. Values only.

Times are seconds of the recording endpoint's monotonic clock; ``clocks`` converts between clocks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.errors import InputError

MAX_TRACE_EVENTS = 256
MAX_TAG = 512

Text = Annotated[str, Meta(max_length=1024)]


class RoomTag(NamedTuple):
    """The engine's request id and the W3C ``traceparent`` of its trace, for logs and traces."""

    request: str = ""
    traceparent: str = ""

    @staticmethod
    def of(request: str, traceparent: str) -> RoomTag:
        """Return a tag; raise ``InputError`` unless both are short text that UTF-8 can encode."""
        for text in (request, traceparent):
            # Only lone surrogates are lost here.
            is_text = isinstance(text, str) and text == text.encode(errors="ignore").decode()
            if not is_text or len(text) > MAX_TAG:
                raise InputError(
                    f"request and traceparent must be strings of at most {MAX_TAG} characters, "
                    f"not {text!r:.300}"
                )
        return RoomTag(request, traceparent) if request or traceparent else NO_TAG


NO_TAG = RoomTag()


class StepKind(StrEnum):
    """Kind of a step. Most are recorded twice: by the endpoint that acts and by its peer."""

    OPENED = "opened"  # the prefill engine opened the room
    ASKED = "asked"  # the decode engine passed pages to fill
    CHAIN_SENT = "chain_sent"  # a pull asks how much the source's instance holds
    ANSWERED = "answered"
    OFFERED = "offered"
    ACCEPTED = "accepted"
    WANTED = "wanted"  # the source requested staging credits
    GRANTED = "granted"
    PUSHED = "pushed"
    GATHERED = "gathered"
    WRITTEN = "written"
    ARRIVED = "arrived"
    SCATTERED = "scattered"
    FINISHED = "finished"  # the prefill engine pushed its last chunk
    CLOSED = "closed"
    STATUS_POLLED = "status_polled"
    COMPLETED = "completed"
    ABORTED = "aborted"
    DRAINED = "drained"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"


class TraceStep(msgspec.Struct, frozen=True, array_like=True):
    """One step: it ended at ``at`` and took ``seconds``."""

    step: StepKind
    at: float
    peer: Text = ""
    seconds: float = 0.0
    num_bytes: int = 0
    mode: Text = ""
    detail: Text = ""

    @property
    def begun(self) -> float:
        """When the step began."""
        return self.at - self.seconds


class RoomTrace(msgspec.Struct, frozen=True):
    """Steps of one room at one endpoint, in order. ``left_out`` counts steps dropped for space."""

    endpoint: Text
    role: Text
    room: Text
    steps: Annotated[tuple[TraceStep, ...], Meta(max_length=MAX_TRACE_EVENTS)] = ()
    request: Text = ""
    traceparent: Text = ""
    left_out: int = 0
