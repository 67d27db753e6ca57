"""The book of a cluster: what is made of views, and what endpoints are told in return."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from telemetry.recorded import source, target

from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.cluster import (
    GONE_S,
    LOOKED_S,
    SHOWN_GONE_S,
    UNLOOKED_S,
    ClusterStatus,
    Registered,
)
from kvferry.telemetry.reports import (
    EndpointView,
    FailureView,
    LinkView,
    ModeBytes,
    RankState,
    RoomView,
)

PREFILL = Registered("p", True, "", "TP2", "shm", 2, frozenset({0, 1}))


def view(role: str = "source", rank: int = 0, clock: float = 0.0, **more: Any) -> EndpointView:
    fields: dict[str, Any] = {
        "instance": "p" if role == "source" else "d",
        "rank": rank,
        "role": role,
        "incarnation": 1,
        "clock": clock,
        "wall": 1e9 + clock,
        "transport": "shm",
        "sharding": "TP2",
        "num_ranks": 2 if role == "source" else 1,
    }
    return EndpointView(**(fields | more))


def sent(num_bytes: int, mode: str = "staged") -> tuple[LinkView, ...]:
    return (LinkView(peer="d/0", state="up", sent=(ModeBytes(mode, num_bytes),)),)


def look(book: ClusterStatus, now: float, *registered: Registered) -> Any:
    return book.look(registered, now, 1e9 + now, "discovery")


def test_what_flows_is_what_was_sent_between_two_views() -> None:
    book = ClusterStatus()
    book.take(view(clock=10.0, links=sent(100)), 0.0)
    assert look(book, 0.0, PREFILL).links[0].bytes_per_s == 0
    book.take(view(clock=12.0, links=sent(2100)), 2.0)
    (link,) = look(book, 2.0, PREFILL).links
    assert (link.source, link.target, link.mode) == ("p/0", "d/0", "staged")
    assert (link.bytes_per_s, link.num_bytes) == (1000.0, 2100)


def test_a_restart_is_no_flow() -> None:
    book = ClusterStatus()
    book.take(view(clock=10.0, links=sent(5000)), 0.0)
    book.take(view(clock=1.0, links=sent(9000), incarnation=2), 1.0)
    assert look(book, 1.0, PREFILL).links[0].bytes_per_s == 0


def test_a_pair_is_shown_once_and_as_its_source_knows_it() -> None:
    book = ClusterStatus()
    offset = Offset(0.0, 0.001)
    mine = LinkView(peer="p/0", state="up", offset=offset)
    book.take(view("target", links=(mine,)), 0.0)
    assert [link.clock_error_s for link in look(book, 0.0).links] == [0.001]
    book.take(view(links=sent(5)), 0.0)
    assert [(link.num_bytes, link.source) for link in look(book, 0.0).links] == [(5, "p/0")]


def test_who_is_silent_is_said_to_be_and_then_gone_and_then_forgotten() -> None:
    book = ClusterStatus()
    book.take(view("target", num_done=3), 0.0)

    def state(now: float) -> list[RankState]:
        return [rank.state for one in look(book, now).instances for rank in one.ranks]

    assert state(1.0) == [RankState.UP]
    assert state(15.0) == [RankState.SILENT]
    (instance,) = look(book, 15.0).instances
    assert (instance.ready, instance.note) == (False, "nothing heard from rank 0")
    assert state(GONE_S + 1) == [RankState.GONE]
    book.forget(SHOWN_GONE_S + 1)
    assert state(SHOWN_GONE_S + 1) == []


def test_a_rank_that_never_told_anything_is_missing_or_merely_registered() -> None:
    book = ClusterStatus()
    book.take(view(rank=0), 0.0)
    half = PREFILL._replace(complete=False, note="'p' waits for rank 1", ranks=frozenset({0}))
    (instance,) = look(book, 0.0, half).instances
    assert [rank.state for rank in instance.ranks] == [RankState.UP, RankState.MISSING]
    assert (instance.ready, instance.note) == (False, "'p' waits for rank 1")
    (whole,) = look(book, 0.0, PREFILL).instances
    assert [rank.state for rank in whole.ranks] == [RankState.UP, RankState.UP]


def test_a_farewell_leaves_nothing() -> None:
    book = ClusterStatus()
    book.take(view("target"), 0.0)
    assert not book.leave("d/0", 2)
    assert book.leave("d/0", 1)
    assert look(book, 0.0).instances == ()


def test_endpoints_tell_more_often_while_somebody_looks() -> None:
    book = ClusterStatus()
    assert book.take(view(), 100.0).every_s == UNLOOKED_S
    look(book, 100.0)
    assert book.take(view(), 101.0).every_s == LOOKED_S
    assert book.take(view(), 200.0).every_s == UNLOOKED_S


def test_a_layout_is_asked_for_until_it_is_there() -> None:
    book = ClusterStatus()
    assert book.take(view(), 0.0).layout
    assert book.take(view(), 0.0).layout


def test_a_story_is_asked_of_everybody_once_and_put_together() -> None:
    book = ClusterStatus()
    book.take(view(), 0.0)
    book.take(view("target"), 0.0)
    book.ask("17", 1.0)
    assert not book.is_told("17", 1.0)
    assert book.take(view(clock=1.0), 1.0).rooms == ("17",)
    assert book.take(view(clock=2.0, traces=(source(),)), 1.1).rooms == ()
    assert not book.is_told("17", 1.1)
    assert book.take(view("target", clock=1.0), 1.2).rooms == ("17",)
    assert not book.is_told("17", 1.2), "who was asked just now has not answered yet"
    book.take(view("target", clock=1.1, traces=(target(),)), 1.3)
    assert book.is_told("17", 1.3)
    trace = book.waterfall("17")
    assert trace is not None
    assert {bar.endpoint for bar in trace.bars} == {"p/0", "d/0"}
    assert book.waterfall("18") is None


def test_who_knows_nothing_of_a_room_answers_with_the_next_view() -> None:
    book = ClusterStatus()
    book.take(view(), 0.0)
    book.ask("17", 1.0)
    assert book.take(view(clock=1.0), 1.0).rooms == ("17",)
    assert not book.is_told("17", 1.0)
    book.take(view(clock=1.1), 1.1)
    assert book.is_told("17", 1.1)


def test_a_room_and_a_failure_are_shown_once() -> None:
    book = ClusterStatus()
    room = RoomView(room="17", status="moving", begun=0.0, seconds=4.0)
    late = FailureView(room="16", at=8.0, code="aborted", reason="told so")
    early = FailureView(room="16", at=7.0, code="peer-gone", reason="lost d/0")
    book.take(view(clock=10.0, rooms=(room,), failures=(early,)), 0.0)
    waiting = msgspec.structs.replace(room, status="waiting", seconds=3.0)
    book.take(view("target", clock=10.0, rooms=(waiting,), failures=(late,)), 0.0)
    shown = look(book, 1.0)
    assert [(one.room, one.status, one.seconds) for one in shown.rooms] == [("17", "waiting", 5.0)]
    assert shown.rooms[0].endpoints == ("p/0", "d/0")
    (failure,) = shown.failures
    assert (failure.code, failure.endpoint) == ("peer-gone", "p/0")
    assert failure.ago_s == pytest.approx(4.0)
