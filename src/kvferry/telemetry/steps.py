"""Steps of a room as one endpoint saw them, and the trace that they make. Values only.

Times are those of the endpoint's monotonic clock. ``clocks`` maps one to another.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TRACE_EVENTS = 256

Text = Annotated[str, Meta(max_length=1024)]


class Moment(StrEnum):
    """Something that happened to a room. Most are said by one side and heard by the other."""

    OPENED = "opened"  # prefill's engine has begun
    ASKED = "asked"  # decode's engine has pages, and wants them filled
    OFFERED = "offered"
    ACCEPTED = "accepted"
    WANTED = "wanted"  # credits for staging
    GRANTED = "granted"
    PUSHED = "pushed"
    GATHERED = "gathered"
    WRITTEN = "written"
    ARRIVED = "arrived"
    SCATTERED = "scattered"
    FINISHED = "finished"  # prefill's engine has pushed everything
    CLOSED = "closed"
    STATUS_POLLED = "status_polled"
    COMPLETED = "completed"
    ABORTED = "aborted"
    DRAINED = "drained"
    DONE = "done"
    FAILED = "failed"
    RELEASED = "released"


class TraceStep(msgspec.Struct, frozen=True, array_like=True):
    """One step. It ended at ``at`` and took ``seconds``; ``heard`` says that a peer told us."""

    step: Moment
    at: float
    peer: Text = ""
    heard: bool = False
    seconds: float = 0.0
    num_bytes: int = 0
    mode: Text = ""
    detail: Text = ""

    @property
    def begun(self) -> float:
        """When it began."""
        return self.at - self.seconds


class RoomTrace(msgspec.Struct, frozen=True):
    """What one endpoint knows of one room, in the order in which it happened.

    ``left_out`` counts the steps for which there was no place any more.
    """

    endpoint: Text
    role: Text
    room: Text
    steps: Annotated[tuple[TraceStep, ...], Meta(max_length=MAX_TRACE_EVENTS)] = ()
    request: Text = ""
    traceparent: Text = ""
    left_out: int = 0

    def when(self, *steps: Moment) -> list[float]:
        """The times of those steps."""
        return [one.at for one in self.steps if one.step in steps]
