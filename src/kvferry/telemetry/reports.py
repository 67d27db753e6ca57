"""Views: how endpoints and the cluster are at one moment, as documents. Values only.

An ``EndpointView`` is what an endpoint tells the discovery service; a ``ClusterView`` is what the
discovery and the router make of all of them for the page, ``kvferry top`` and programs.
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
# A view fits into what the discovery service takes at once.
MAX_TRACES = 4

Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class ModeBytes(msgspec.Struct, frozen=True, array_like=True):
    """What was written by one mode."""

    mode: Text
    num_bytes: Count


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, as an endpoint knows it. Only a source has ``sent`` anything."""

    peer: Text
    state: Text
    transport: Text = ""
    silent_s: float = 0.0
    sent: Annotated[tuple[ModeBytes, ...], Meta(max_length=16)] = ()
    offset: Offset | None = None


class RoomView(msgspec.Struct, frozen=True, kw_only=True):
    """One room of one endpoint, open or ended, since ``begun`` by its clock."""

    room: Text
    status: Text
    begun: float
    seconds: float
    peer: Text = ""
    request: Text = ""


class FailureView(msgspec.Struct, frozen=True, kw_only=True):
    """A room that failed, and why in words."""

    room: Text
    at: float
    code: Text
    reason: Text
    request: Text = ""


class EndpointView(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint at ``clock`` by its own clock and ``wall`` by the time of day.

    ``layout`` and ``traces`` are there when they were asked for. ``troubles`` are threads of
    its own that do not live as they should.
    """

    instance: Text
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    role: Text
    incarnation: Annotated[int, Meta(ge=0, le=MAX_ID)]
    clock: float
    wall: float
    transport: Text
    sharding: Text
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    num_open: Count = 0
    num_quarantined: Count = 0
    num_done: Count = 0
    num_failed: Count = 0
    staging_used_bytes: Count = 0
    staging_bytes: Count = 0
    pages_held: Count = 0
    pages: Count = 0
    troubles: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()
    links: Annotated[tuple[LinkView, ...], Meta(max_length=MAX_LINKS)] = ()
    rooms: Annotated[tuple[RoomView, ...], Meta(max_length=MAX_ROOMS_SHOWN)] = ()
    slow: Annotated[tuple[RoomView, ...], Meta(max_length=MAX_SLOW_SHOWN)] = ()
    failures: Annotated[tuple[FailureView, ...], Meta(max_length=MAX_FAILURES_SHOWN)] = ()
    traces: Annotated[tuple[RoomTrace, ...], Meta(max_length=MAX_TRACES)] = ()
    layout: Layout | None = None

    @property
    def name(self) -> str:
        """As everybody knows it."""
        return f"{self.instance}/{self.rank}"


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery wants of an endpoint next: when, which traces, whether its layout."""

    every_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    rooms: tuple[Text, ...] = ()
    layout: bool = False


# ---------------------------------------------------------------- a cluster


class RankState(StrEnum):
    """How a rank is, as far as the discovery service can tell."""

    UP = "up"
    TROUBLED = "troubled"
    SILENT = "silent"
    GONE = "gone"
    MISSING = "missing"


class RankShown(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an instance. Rates are bytes per second that it sends."""

    rank: int
    state: RankState
    note: str = ""
    silent_s: float | None = None
    num_open: int = 0
    num_quarantined: int = 0
    num_done: int = 0
    num_failed: int = 0
    staging_used_bytes: int = 0
    staging_bytes: int = 0
    pages_held: int = 0
    pages: int = 0
    bytes_per_s: float = 0.0


class InstanceShown(msgspec.Struct, frozen=True, kw_only=True):
    """One instance with all its ranks, also those that are not there."""

    name: str
    role: str
    sharding: str
    transport: str
    ready: bool
    note: str
    ranks: tuple[RankShown, ...]


class LinkShown(msgspec.Struct, frozen=True, kw_only=True):
    """One source and one target that know each other. ``mode`` carried most of late."""

    source: str
    target: str
    state: str
    transport: str
    mode: str = ""
    bytes_per_s: float = 0.0
    num_bytes: int = msgspec.field(default=0, name="bytes")
    clock_error_s: float | None = None


class RoomShown(msgspec.Struct, frozen=True, kw_only=True):
    """One room, with every endpoint that has it."""

    room: str
    status: str
    seconds: float
    endpoints: tuple[str, ...]
    request: str = ""


class FailureShown(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, so many seconds ago."""

    room: str
    endpoint: str
    ago_s: float
    code: str
    reason: str
    request: str = ""


class WorkerShown(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as a router knows it."""

    name: str
    part: str
    url: str
    model: str
    up: bool
    in_flight: int
    problem: str


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows, at one moment."""

    at: float
    served_by: str
    instances: tuple[InstanceShown, ...]
    links: tuple[LinkShown, ...]
    rooms: tuple[RoomShown, ...]
    slow: tuple[RoomShown, ...]
    failures: tuple[FailureShown, ...]
    num_open: int = 0
    bytes_per_s: float = 0.0
    rooms_per_s: float = 0.0
    workers: tuple[WorkerShown, ...] = ()
    problem: str = ""
