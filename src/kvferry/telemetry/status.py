"""Status documents of endpoints and of the cluster. Values only.

An endpoint sends an ``EndpointStatus`` to the discovery service. The service merges all of them
into one ``ClusterStatus``, which the page, ``kvferry top`` and programs read.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.ids import MAX_ID
from kvferry.layout.layout import MAX_RANKS, Layout
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.steps import RoomTrace, Text

MAX_LINKS = 4096
MAX_ROOMS_SHOWN = 64
MAX_FAILURES_SHOWN = 16
MAX_SLOW_SHOWN = 8
# Keeps a report below the discovery service's limit for a request body.
MAX_TRACES = 4

Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class RankState(StrEnum):
    """State of a rank, as far as the discovery service knows."""

    UP = "up"
    TROUBLED = "troubled"  # a thread of the endpoint is stalled or has ended
    SILENT = "silent"
    GONE = "gone"
    MISSING = "missing"


# States of ranks that report.
ALIVE = (RankState.UP, RankState.TROUBLED)


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and state of one rank. Rates are means over the last few seconds."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    state: RankState = RankState.UP
    note: Text = ""
    num_open: Count = 0
    num_quarantined: Count = 0
    num_done: Count = 0
    num_failed: Count = 0
    staging_used_bytes: Count = 0
    staging_bytes: Count = 0
    pages_held: Count = 0
    pages: Count = 0
    tokens_held: Count = 0
    quarantined_bytes: Count = 0
    bytes_per_s: float = 0.0
    rooms_per_s: float = 0.0


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One link between a source and a target. ``mode`` has carried most of its bytes.

    ``offset`` is how far the peer's clock is ahead of the reporting endpoint's.
    """

    source: Text
    target: Text
    state: Text
    transport: Text = ""
    mode: Text = ""
    bytes_per_s: float = 0.0
    num_bytes: Count = msgspec.field(default=0, name="bytes")
    offset: Offset | None = None


class RoomStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One open or ended room, and the endpoints that report it."""

    room: Text
    status: Text
    seconds: float
    endpoints: tuple[Text, ...]
    request: Text = ""


class FailureStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A room that failed ``ago_s`` seconds ago, and why."""

    room: Text
    endpoint: Text
    ago_s: float
    code: Text
    reason: Text
    request: Text = ""


class EndpointStatus(RankStatus, frozen=True, kw_only=True):
    """Report of one endpoint at ``clock`` (its monotonic clock) and ``wall`` (time of day).

    ``traces`` are those that a ``ReportRequest`` asked for.
    """

    instance: Text
    role: Text
    incarnation: Annotated[int, Meta(ge=0, le=MAX_ID)]
    clock: float
    wall: float
    transport: Text
    layout: Layout
    links: Annotated[tuple[LinkStatus, ...], Meta(max_length=MAX_LINKS)] = ()
    rooms: Annotated[tuple[RoomStatus, ...], Meta(max_length=MAX_ROOMS_SHOWN)] = ()
    slow: Annotated[tuple[RoomStatus, ...], Meta(max_length=MAX_SLOW_SHOWN)] = ()
    failures: Annotated[tuple[FailureStatus, ...], Meta(max_length=MAX_FAILURES_SHOWN)] = ()
    traces: Annotated[tuple[RoomTrace, ...], Meta(max_length=MAX_TRACES)] = ()

    @property
    def name(self) -> str:
        """The endpoint's name: instance and rank."""
        return f"{self.instance}/{self.rank}"


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which rooms' traces the next report should hold, and after how many seconds it is due."""

    every_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    rooms: tuple[Text, ...] = ()


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance with all its ranks. ``note`` says which of them do not report."""

    name: str
    role: str
    sharding: str
    transport: str
    note: str
    ranks: tuple[RankStatus, ...]


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in a router's pool. ``max_in_flight`` is None if it reports no limit."""

    name: str
    role: str
    url: str
    model: str
    up: bool
    in_flight: int
    problem: str
    max_in_flight: int | None = None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster at the time of day ``at``: the document behind the page."""

    at: float
    served_by: str
    instances: tuple[InstanceStatus, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    rooms: tuple[RoomStatus, ...] = ()
    slow: tuple[RoomStatus, ...] = ()
    failures: tuple[FailureStatus, ...] = ()
    num_open: int = 0
    bytes_per_s: float = 0.0
    rooms_per_s: float = 0.0
    workers: tuple[WorkerStatus, ...] = ()
    problem: str = ""
