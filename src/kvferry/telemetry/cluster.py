"""The book of a cluster: the last views of its endpoints, and what they say together. Pure.

The discovery service has one. An endpoint tells its view every few seconds and is told in return
what is wanted of it: more often while somebody looks, and traces of rooms that somebody has
asked for. Time is given; one owner calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import msgspec

from kvferry.layout.layout import Layout
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.reports import (
    MAX_TRACES,
    ClusterView,
    EndpointView,
    FailureShown,
    InstanceShown,
    LinkShown,
    LinkView,
    RankShown,
    RankState,
    ReportRequest,
    RoomShown,
    RoomView,
)
from kvferry.telemetry.steps import RoomTrace
from kvferry.telemetry.waterfall import Waterfall, join

MAX_ENDPOINTS = 16384
# How often views are told while somebody looks, and while nobody does.
LOOKED_S, UNLOOKED_S = 1.0, 3.0
# No more views in a second than this, however many endpoints there are.
MOST_VIEWS_PER_S = 200.0
# After the last look, views stay fresh for as long.
LOOK_LASTS_S = 10.0
# An endpoint that missed so many of its times is silent, and after so long it is gone.
MISSED, GONE_S = 3.0, 30.0
# Who is gone is shown for as long, and then forgotten.
SHOWN_GONE_S = 600.0
ASK_LASTS_S = 60.0
MAX_ASKS = 64
# Who asks for the picture after the document gets the same trace.
STORY_FRESH_S = 2.0
LIVING = (RankState.UP, RankState.TROUBLED)
MOST_SHOWN, MOST_SLOW, MOST_FAILURES = 100, 10, 20


@dataclass(slots=True)
class _KnownEndpoint:
    """An endpoint: its last view and the one before, when they came, and its layout."""

    view: EndpointView
    told_at: float
    every_s: float
    before: EndpointView | None = None
    layout: Layout | None = None

    def state(self, now: float) -> RankState:
        """How it is, as far as can be told."""
        silent_s = now - self.told_at
        if silent_s > GONE_S:
            return RankState.GONE
        if silent_s > MISSED * self.every_s + 1.0:
            return RankState.SILENT
        return RankState.TROUBLED if self.view.troubles else RankState.UP

    @property
    def elapsed_s(self) -> float:
        """Between the two views."""
        if self.before is None or self.before.incarnation != self.view.incarnation:
            return 0.0
        return self.view.clock - self.before.clock


@dataclass(slots=True)
class _ReportRequests:
    """A room whose traces are wanted: who was told so, and who has answered."""

    at: float
    told: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    traces: dict[str, RoomTrace] = field(default_factory=dict)


class Registered(NamedTuple):
    """What the registry says of an instance that sends."""

    name: str
    complete: bool
    note: str
    sharding: str
    transport: str
    num_ranks: int
    ranks: frozenset[int]


class ClusterStatus:
    """Everything that endpoints have told."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownEndpoint] = {}
        self._asks: dict[str, _ReportRequests] = {}
        self._looked_at = -inf

    # ------------------------------------------------------------ what endpoints say

    def take(self, view: EndpointView, now: float) -> ReportRequest:
        """A view has come; what is wanted of its endpoint."""
        # First: what it is asked for now, it answers with its next view.
        self._hear_stories(view)
        name, wishes = view.name, self._wishes(view, now)
        known = self._known.get(name)
        if known is None or known.view.incarnation != view.incarnation:
            if known is None and len(self._known) >= MAX_ENDPOINTS:
                return wishes
            self._known[name] = _KnownEndpoint(view, now, wishes.every_s, layout=view.layout)
        else:
            known.before, known.view = known.view, view
            known.told_at, known.every_s = now, wishes.every_s
            known.layout = view.layout or known.layout
        return wishes

    def _wishes(self, view: EndpointView, now: float) -> ReportRequest:
        known = self._known.get(view.name)
        has_layout = known is not None and known.view.incarnation == view.incarnation
        has_layout = (has_layout and known.layout is not None) if known else False
        rooms = [room for room, ask in self._asks.items() if view.name not in ask.told]
        rooms = rooms[:MAX_TRACES]
        for room in rooms:
            self._asks[room].told.add(view.name)
        looked = now - self._looked_at < LOOK_LASTS_S
        every_s = max(LOOKED_S if looked else UNLOOKED_S, len(self._known) / MOST_VIEWS_PER_S)
        wants_layout = not has_layout and view.layout is None
        return ReportRequest(every_s=every_s, rooms=tuple(rooms), layout=wants_layout)

    def _hear_stories(self, view: EndpointView) -> None:
        told = {trace.room: trace for trace in view.traces}
        for room, ask in self._asks.items():
            if room in told:
                ask.traces[view.name] = told[room]
                ask.answered.add(view.name)
            elif view.name in ask.told:
                ask.answered.add(view.name)

    def leave(self, name: str, incarnation: int) -> bool:
        """An endpoint has said farewell. Whether it was known in that life."""
        known = self._known.get(name)
        if known is None or known.view.incarnation != incarnation:
            return False
        del self._known[name]
        return True

    def forget(self, now: float) -> None:
        """Let go of who is long gone, and of questions that nobody asks any more."""
        for name, known in list(self._known.items()):
            if now - known.told_at > SHOWN_GONE_S:
                del self._known[name]
        for room, ask in list(self._asks.items()):
            if now - ask.at > ASK_LASTS_S:
                del self._asks[room]

    # ------------------------------------------------------------ traces

    def ask(self, room: str, now: float) -> None:
        """Somebody wants a room's trace: have everybody tell it, unless they just have."""
        self._looked_at = now
        asked = self._asks.get(room)
        if asked is not None and now - asked.at < STORY_FRESH_S:
            return
        self._asks.pop(room, None)
        while len(self._asks) >= MAX_ASKS:
            del self._asks[next(iter(self._asks))]
        self._asks[room] = _ReportRequests(now)

    def is_told(self, room: str, now: float) -> bool:
        """Whether everybody who could has answered."""
        ask = self._asks.get(room)
        living = {name for name, known in self._known.items() if known.state(now) in LIVING}
        return ask is None or living <= ask.answered

    def waterfall(self, room: str) -> Waterfall | None:
        """A room's trace, as far as it was told; None if nobody knows the room."""
        ask = self._asks.get(room)
        if ask is None or not ask.traces:
            return None
        days = {name: known.view.wall - known.view.clock for name, known in self._known.items()}
        return join(list(ask.traces.values()), self.offsets(), days)

    def offsets(self) -> dict[tuple[str, str], Offset]:
        """Every measurement of a clock by another."""
        return {
            (name, link.peer): link.offset
            for name, known in self._known.items()
            for link in known.view.links
            if link.offset is not None
        }

    # ------------------------------------------------------------ all of it

    def layout_of(self, instance: str) -> Layout | None:
        """How an instance shards, if any of its ranks has said so."""
        for known in self._known.values():
            if known.view.instance == instance and known.layout is not None:
                return known.layout
        return None

    def look(
        self, registered: Iterable[Registered], now: float, wall: float, served_by: str
    ) -> ClusterView:
        """The cluster as it is. Somebody looks, so views come more often from now on."""
        self._looked_at = now
        instances = _instances(self._known, {one.name: one for one in registered}, now)
        links = links_of(self._known, now)
        live = [known for known in self._known.values() if known.state(now) is not RankState.GONE]
        rooms = _merged(((known, known.view.rooms) for known in live), now)
        return ClusterView(
            at=wall,
            served_by=served_by,
            instances=instances,
            links=links,
            rooms=rooms[:MOST_SHOWN],
            slow=_merged(((known, known.view.slow) for known in live), now)[:MOST_SLOW],
            failures=tuple(_failures(self._known.values(), now)[:MOST_FAILURES]),
            num_open=len(rooms),
            bytes_per_s=sum(link.bytes_per_s for link in links),
            rooms_per_s=sum(map(_rooms_per_s, live)),
        )


# ---------------------------------------------------------------- instances


def _instances(
    known: Mapping[str, _KnownEndpoint], registered: Mapping[str, Registered], now: float
) -> tuple[InstanceShown, ...]:
    by_instance: dict[str, dict[int, _KnownEndpoint]] = {}
    for one in known.values():
        by_instance.setdefault(one.view.instance, {})[one.view.rank] = one
    names = {*by_instance, *registered}
    shown = [
        _instance(name, by_instance.get(name, {}), registered.get(name), now) for name in names
    ]
    return tuple(sorted(shown, key=lambda one: (one.role != "source", one.name)))


def _instance(
    name: str, told: Mapping[int, _KnownEndpoint], registered: Registered | None, now: float
) -> InstanceShown:
    newest = max(told.values(), key=lambda one: one.told_at).view if told else None
    role = newest.role if newest is not None else "source"
    num_ranks = newest.num_ranks if newest else registered.num_ranks if registered else 0
    ranks = tuple(_rank(rank, told.get(rank), registered, now) for rank in range(num_ranks))
    down = [one.rank for one in ranks if one.state not in LIVING]
    is_listed = registered is not None and registered.complete
    ready = not down and (is_listed or role == "target")
    note = "" if ready else registered.note if registered and not is_listed else _lacking(down)
    if role == "source" and registered is None:
        note = "not at the discovery service any more"
    return InstanceShown(
        name=name,
        role=role,
        sharding=newest.sharding if newest else registered.sharding if registered else "",
        transport=newest.transport if newest else registered.transport if registered else "",
        ready=ready,
        note=note,
        ranks=ranks,
    )


def _lacking(down: list[int]) -> str:
    listed = ", ".join(map(str, down[:8])) + (", …" if len(down) > 8 else "")
    return f"nothing heard from rank {listed}" if down else "not complete"


def _rank(
    rank: int, known: _KnownEndpoint | None, registered: Registered | None, now: float
) -> RankShown:
    is_registered = registered is not None and rank in registered.ranks
    if known is None:
        state = RankState.UP if is_registered else RankState.MISSING
        note = "registered; it tells no more of itself" if is_registered else "not there"
        return RankShown(rank=rank, state=state, note=note)
    view, state = known.view, known.state(now)
    silent_s = now - known.told_at
    if state is RankState.SILENT and view.role == "source" and not is_registered:
        # Its lease has ended as well.
        state = RankState.GONE
    note = "; ".join(view.troubles)
    if state in (RankState.SILENT, RankState.GONE):
        note = f"nothing heard for {silent_s:.0f} s"
    return RankShown(
        rank=rank,
        state=state,
        note=note,
        silent_s=silent_s,
        num_open=view.num_open,
        num_quarantined=view.num_quarantined,
        num_done=view.num_done,
        num_failed=view.num_failed,
        staging_used_bytes=view.staging_used_bytes,
        staging_bytes=view.staging_bytes,
        pages_held=view.pages_held,
        pages=view.pages,
        bytes_per_s=sum(_rates(known).values()) if state in LIVING else 0.0,
    )


# ---------------------------------------------------------------- links


def _rates(known: _KnownEndpoint) -> dict[str, float]:
    """Bytes per second to each peer, between the last two views."""
    if known.before is None or known.elapsed_s <= 0:
        return {}
    before = {link.peer: _total(link) for link in known.before.links}
    rates: dict[str, float] = {}
    for link in known.view.links:
        # A peer may have two sessions, while one of them ends; what was sent is told for both.
        sent = max(0, _total(link) - before.get(link.peer, 0))
        rates[link.peer] = sent / known.elapsed_s
    return rates


def _total(link: LinkView) -> int:
    return sum(each.num_bytes for each in link.sent)


def _rooms_per_s(known: _KnownEndpoint) -> float:
    """Rooms that ended, at targets, of which each instance counts by its rank 0."""
    view, before = known.view, known.before
    if view.role != "target" or view.rank != 0 or before is None or known.elapsed_s <= 0:
        return 0.0
    ended = view.num_done + view.num_failed - before.num_done - before.num_failed
    return max(0.0, ended / known.elapsed_s)


def links_of(known: Mapping[str, _KnownEndpoint], now: float) -> tuple[LinkShown, ...]:
    """Every pair of a source and a target that know each other, once."""
    found: dict[tuple[str, str], LinkShown] = {}
    silent = {name for name, one in known.items() if one.state(now) not in LIVING}
    for one in sorted(known.values(), key=lambda one: one.view.role == "source"):
        rates = _rates(one) if one.view.name not in silent else {}
        for link in one.view.links:
            is_source = one.view.role == "source"
            ends = (one.view.name, link.peer) if is_source else (link.peer, one.view.name)
            if is_source or ends not in found:
                shown = _link(ends, one, link, rates.get(link.peer, 0.0))
                # What a silent end said last is not what is.
                lost = silent.intersection(ends)
                found[ends] = msgspec.structs.replace(shown, state="silent") if lost else shown
    return tuple(found[ends] for ends in sorted(found))


def _link(ends: tuple[str, str], known: _KnownEndpoint, link: LinkView, rate: float) -> LinkShown:
    return LinkShown(
        source=ends[0],
        target=ends[1],
        state=link.state,
        transport=link.transport or known.view.transport,
        mode=_mode_of(known.before, link),
        bytes_per_s=rate,
        num_bytes=_total(link),
        clock_error_s=None if link.offset is None else link.offset.error_s,
    )


def _mode_of(before: EndpointView | None, link: LinkView) -> str:
    """The mode that carried most since the view before, or in all where nothing flows."""
    was = {
        each.mode: each.num_bytes
        for one in (before.links if before else ())
        if one.peer == link.peer
        for each in one.sent
    }
    if not link.sent:
        return ""
    lately = max(link.sent, key=lambda each: each.num_bytes - was.get(each.mode, 0))
    if lately.num_bytes > was.get(lately.mode, 0):
        return lately.mode
    return max(link.sent, key=lambda each: each.num_bytes).mode


# ---------------------------------------------------------------- rooms


def _merged(
    told: Iterable[tuple[_KnownEndpoint, Iterable[RoomView]]], now: float
) -> tuple[RoomShown, ...]:
    """Each room once, the longest first, with everybody who has it."""
    found: dict[str, RoomShown] = {}
    for one, rooms in told:
        waited_s = now - one.told_at
        for room in rooms:
            seconds = room.seconds + (waited_s if room.status != "ended" else 0.0)
            had = found.get(room.room)
            found[room.room] = RoomShown(
                room=room.room,
                status=_status(had.status if had else "", room.status, one.view.role),
                seconds=max(seconds, had.seconds if had else 0.0),
                endpoints=(*(had.endpoints if had else ()), one.view.name),
                request=room.request or (had.request if had else ""),
            )
    return tuple(sorted(found.values(), key=lambda room: -room.seconds))


def _status(had: str, new: str, role: str) -> str:
    """What a target says, where one says anything: it knows what has arrived."""
    return new if not had or role == "target" else had


def _failures(known: Iterable[_KnownEndpoint], now: float) -> list[FailureShown]:
    """The latest first. Of one room only whoever failed first: the others were told."""
    found: dict[str, FailureShown] = {}
    for one in known:
        for failure in one.view.failures:
            ago_s = now - one.told_at + one.view.clock - failure.at
            had = found.get(failure.room)
            if had is None or ago_s > had.ago_s:
                found[failure.room] = FailureShown(
                    room=failure.room,
                    endpoint=one.view.name,
                    ago_s=ago_s,
                    code=failure.code,
                    reason=failure.reason,
                    request=failure.request,
                )
    return sorted(found.values(), key=lambda failure: failure.ago_s)
