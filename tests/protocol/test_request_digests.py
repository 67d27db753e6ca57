"""Comparison of the computed request with the requested one."""

from __future__ import annotations

import msgspec
import pytest
from wire import ROOM, World, dense, let_go
from wire import small_world as world

from kvferry.ids import Generation, Peer
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.plan.reshard import reshard
from kvferry.protocol.events import Cancel, Finish, Push, Report
from kvferry.protocol.ledger import Ledger
from kvferry.protocol.messages import Close, Complete
from kvferry.protocol.outcome import Failure, FailureCode

S0, S1 = Peer("prefill", 0), Peer("prefill", 1)
T0 = Peer("decode0", 0)


def receive(w: World, digest: bytes, tokens: int = 8) -> None:
    """Receive a room with a digest on every decode rank."""
    for peer in w.targets:
        event = w.receive_event(peer, ROOM, Request(tokens), w.now + 60)
        wanted = msgspec.structs.replace(event.wanted, digest=digest)
        w.tell(peer, msgspec.structs.replace(event, wanted=wanted))
    w.run()


def finish(w: World, source: Peer, digest: bytes, tokens: int = 8) -> None:
    w.tell(source, Push(ROOM, Span(0, tokens)))
    w.tell(source, Finish(ROOM, tokens, b"first token", digest))
    w.run()


def test_the_same_request_on_both_sides() -> None:
    w = world(source_tp=2, target_tp=2)
    w.open(ROOM)
    receive(w, b"the prompt")
    for source in w.sources:
        finish(w, source, b"the prompt")
    assert w.outcomes(ROOM) == {"done"}
    assert {close.digest for close in w.where(Close)} == {b"the prompt"}, "from every source"  # type: ignore[union-attr]
    w.finish()


@pytest.mark.parametrize(
    ("computed", "asked"),
    [(b"A", b"B"), (b"A", b""), (b"", b"B"), (b"A", b"AA")],
    ids=["another", "decode is silent", "prefill is silent", "longer"],
)
@pytest.mark.parametrize("first", ["offer", "prefill"])
def test_other_request_in_the_same_room(computed: bytes, asked: bytes, first: str) -> None:
    w = world(source_tp=2, target_tp=2)
    w.open(ROOM)
    if first == "offer":
        receive(w, asked)
    for source in w.sources:
        finish(w, source, computed)
    if first == "prefill":
        receive(w, asked)
    assert w.outcomes(ROOM) == {"content-differs"}
    assert not w.sent(Complete)
    let_go(w)
    w.finish()


def test_a_fully_cached_prompt_is_compared_too() -> None:
    """No data moves, but the first token would belong to another prompt."""
    w = world()
    w.open(ROOM)
    event = w.receive_event(T0, ROOM, Request(8, 8), w.now + 60)
    wanted = msgspec.structs.replace(event.wanted, digest=b"B")
    w.tell(T0, msgspec.structs.replace(event, wanted=wanted))
    w.run()
    finish(w, S0, b"A")
    assert w.outcomes(ROOM) == {"content-differs"}
    let_go(w)
    w.finish()


def test_one_source_with_another_request_fails_the_room() -> None:
    w = world(source_tp=2)
    w.open(ROOM)
    receive(w, b"B")
    finish(w, S0, b"B")
    finish(w, S1, b"A")
    assert w.outcomes(ROOM) == {"content-differs"}
    let_go(w)
    w.finish()


def unusable(w: World) -> int:
    """Return the number of unusable layers and tokens per source."""
    return sum(len(block.layers) * len(block.tokens) for block in w.target().rooms[ROOM].unusable())


def test_blocks_count_after_a_fitting_close() -> None:
    w = world(source_tp=2)
    w.open(ROOM)
    receive(w, b"B")
    everything = unusable(w)
    w.tell(S0, Push(ROOM, Span(0, 8)))
    w.run()
    assert w.target().rooms[ROOM].ledger.missing(0) == 0
    assert unusable(w) == everything, "all of it came, and nobody has said what it is"
    w.tell(S0, Finish(ROOM, 8, b"", b"B"))
    w.run()
    assert unusable(w) == everything // 2
    w.hold.writes = True
    w.tell(S1, Push(ROOM, Span(0, 8)))
    w.run()
    held = w.writes.pop()
    w.target().rooms[ROOM].failure = Failure(FailureCode.CONTENT_DIFFERS)
    assert unusable(w) == everything, "the room was found out elsewhere"
    w.target().rooms[ROOM].failure = None
    w.end_write(held)
    finish_late(w)


def finish_late(w: World) -> None:
    w.hold.writes = False
    w.tell(S1, Finish(ROOM, 8, b"", b"B"))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_without_digests_blocks_count_on_arrival() -> None:
    w = world()
    w.open(ROOM)
    receive(w, b"")
    w.tell(S0, Push(ROOM, Span(0, 4)))
    w.run()
    (block,) = w.target().rooms[ROOM].unusable()
    assert block.tokens == Span(4, 8)
    w.tell(S0, Push(ROOM, Span(4, 8)))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_a_reported_failure_names_the_blocks_that_lack_data() -> None:
    w = world()
    w.open(ROOM)
    receive(w, b"")
    w.tell(S0, Push(ROOM, Span(0, 4)))
    w.run()
    (report,) = (a for a in w.target().handle(Cancel(ROOM), w.now) if isinstance(a, Report))
    assert isinstance(report.outcome, Failure)
    assert report.unusable is not None
    assert [block.tokens for block in report.unusable] == [Span(4, 8)]


def test_messages_of_failures() -> None:
    def said(computed: bytes, asked: bytes) -> str:
        ledger = Ledger(reshard(dense(), dense()), 0, Request(8), asked)
        return str(ledger.problem(Close(1, Generation(1), 8, (), None, computed)))

    assert said(b"A", b"A") == said(b"", b"") == "None"
    assert said(b"A", b"B").endswith("give each request a room id of its own")
    assert "decode gave no digest" in said(b"A", b"")
    assert "prefill gave no digest" in said(b"", b"B")
