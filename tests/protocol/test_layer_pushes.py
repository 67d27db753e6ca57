"""Pushes of single layers, in any cut and order."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import DENSE, ROOM, World, always_stage, dense, never_stage, small_world

from kvferry.config import ProtocolConfig
from kvferry.errors import Misuse
from kvferry.ids import Peer
from kvferry.layout import Layout, Span
from kvferry.layout.spec import StateRow
from kvferry.plan import Request
from kvferry.protocol.events import Finish, Prepare, Push
from kvferry.protocol.messages import Arrived, Close, Staging, Want
from kvferry.protocol.writes import MAX_DIRECT_PER_TRANSFER
from kvferry.testing.strategies import pairs

S0 = Peer("prefill", 0)
ONE, TWO, BOTH = Span(0, 1), Span(1, 2), Span(0, 2)
NUM_TOKENS = 9


def edges(end: int) -> st.SearchStrategy[list[Span]]:
    """Cut a range at arbitrary places."""
    cuts = st.lists(st.integers(1, max(1, end - 1)), max_size=2)
    return cuts.map(
        lambda some: [
            Span(a, b)
            for a, b in zip([0, *sorted(some)], [*sorted(some), end], strict=True)
            if a < b
        ]
    )


@st.composite
def pushes(draw: st.DrawFn, num_layers: int, *, states: bool) -> list[Push]:
    """Every token of every layer, in arbitrary chunks and order."""
    found = []
    for tokens in draw(edges(NUM_TOKENS)):
        last = tokens.end == NUM_TOKENS
        if draw(st.booleans()):
            with_rows = states and last and draw(st.booleans())
            found.append(Push(ROOM, tokens, None, with_rows))
            continue
        for layers in draw(edges(num_layers)):
            with_rows = states and last and draw(st.booleans())
            found.append(Push(ROOM, tokens, layers, with_rows))
    return draw(st.permutations(found))


@settings(max_examples=30, deadline=None)
@given(pairs(), st.integers(0, NUM_TOKENS), st.booleans(), st.data())
def test_any_cut_in_any_order_arrives_once(
    pair: tuple[Layout, Layout], prefix: int, staged: bool, data: st.DataObject
) -> None:
    source, target = pair
    stages = always_stage if staged else never_stage
    staging = Staging(slot_bytes=256, num_slots=3) if staged else Staging()
    w = World(source, (target,), ProtocolConfig(), staging, stages)
    w.open(ROOM)
    late = data.draw(st.booleans())
    if not late:
        w.receive(ROOM, Request(NUM_TOKENS, prefix))
        w.run()
    states = any(isinstance(group.kind, StateRow) for group in source.spec.groups)
    for peer in list(w.sources):
        # Ranks may push in different ways.
        for push in data.draw(pushes(source.spec.num_layers, states=states)):
            w.tell(peer, push)
    w.run()
    assert "done" not in w.outcomes(ROOM)
    w.each_source(Finish(ROOM, NUM_TOKENS, b"meta"))
    if late:
        w.receive(ROOM, Request(NUM_TOKENS, prefix))
    w.run()
    w.wait(8)
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def started(**about: bool) -> World:
    w = small_world(**about)
    w.open(ROOM)
    w.receive(ROOM, Request(8))
    w.run()
    return w


def test_one_layer_does_not_count_for_all() -> None:
    w = started()
    w.tell(S0, Push(ROOM, Span(0, 8), ONE))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"not-all-pushed"}
    (failure,) = w.reports[S0, ROOM]
    assert "<kv layers [1, 2) tokens [0, 8)> was never pushed" in str(failure)
    assert "pushed were [0, 8)" in str(failure)
    w.finish()


def test_room_is_not_done_before_the_last_layer() -> None:
    w = started()
    w.tell(S0, Push(ROOM, Span(0, 8), TWO))
    w.run()
    w.hold.writes = True
    w.tell(S0, Push(ROOM, Span(0, 8), ONE))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == set()
    assert not w.where(Close)
    w.end_write(w.writes.pop())
    w.run()
    (close,) = w.where(Close)
    assert isinstance(close, Close)
    assert [str(block) for block in close.written] == ["<kv layers [0, 2) tokens [0, 8)>"]
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


@pytest.mark.parametrize(
    "again",
    [
        Push(ROOM, Span(0, 4), ONE),
        Push(ROOM, Span(3, 8), ONE),
        Push(ROOM, Span(0, 8)),
        Push(ROOM, Span(6, 8), TWO),
    ],
)
def test_pushing_a_layer_twice_is_misuse(again: Push) -> None:
    w = started()
    w.tell(S0, Push(ROOM, Span(0, 4), ONE))
    w.tell(S0, Push(ROOM, Span(4, 8)))
    with pytest.raises(Misuse, match="some of the tokens"):
        w.tell(S0, again)
    w.tell(S0, Push(ROOM, Span(0, 4), TWO))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


# ---------------------------------------------------------------- what it costs


def test_waiting_pushes_become_one_write() -> None:
    w = started()
    w.hold.writes = True
    for tokens, layers in product([Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8)], [ONE, TWO]):
        w.tell(S0, Push(ROOM, tokens, layers))
    w.run()
    assert len(w.writes) == MAX_DIRECT_PER_TRANSFER
    w.end_write(w.writes.pop(0))
    w.run()
    (_, write) = w.writes[-1]
    assert [str(block) for block in write.blocks] == [
        f"<kv layers [0, 2) tokens [{first}, {first + 2})>" for first in (2, 4, 6)
    ]
    while w.writes:
        w.end_write(w.writes.pop())
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_first_layer_requests_credits_for_all() -> None:
    w = started(staged=True)
    for layers in (ONE, TWO):
        w.tell(S0, Push(ROOM, Span(0, 4), layers))
        w.run()
    wants = [want.total for want in w.where(Want) if isinstance(want, Want)]
    assert wants == [4], "asked once, for both"
    w.tell(S0, Push(ROOM, Span(4, 8)))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    wants = [want.total for want in w.where(Want) if isinstance(want, Want)]
    assert wants == [4, 8]
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_prepared_credits_are_not_requested_again() -> None:
    w = started(staged=True)
    w.tell(S0, Prepare(ROOM, Span(0, 8)))
    w.run()
    for tokens, layers in product([Span(0, 4), Span(4, 8)], [TWO, ONE]):
        w.tell(S0, Push(ROOM, tokens, layers))
        w.run()
    w.tell(S0, Prepare(ROOM, Span(0, 8)))
    w.tell(S0, Finish(ROOM, 8))
    w.run()
    (want,) = w.where(Want)
    assert isinstance(want, Want)
    assert want.total == 8
    assert not any(
        outbound.expected for r in w.source().rooms.values() for outbound in r.outbounds.values()
    )
    assert w.outcomes(ROOM) == {"done"}
    w.finish()


def test_waiting_layers_share_a_slot() -> None:
    # A slot has room for a token of both layers, and here for one layer of two tokens.
    w = World(dense(), (dense(),), ProtocolConfig(), Staging(128, 1), always_stage)
    w.open(ROOM)
    w.receive(ROOM, Request(4))
    w.run()
    w.hold.scatters = True
    for layers in (ONE, TWO):
        w.tell(S0, Push(ROOM, Span(0, 1), layers))
    w.tell(S0, Push(ROOM, Span(1, 4)))
    w.tell(S0, Finish(ROOM, 4))
    w.run()
    (_, first) = w.scatters[0]
    w.hold.scatters = False
    w.end_scatter(w.scatters.pop())
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    assert [str(block) for block in first.blocks][:1] == ["<kv layers [0, 2) tokens [0, 1)>"]
    w.finish()


def test_close_with_too_many_blocks_repeats_notes() -> None:
    # Every second token goes through a slot, so that what was written directly never joins.
    num_tokens = 2 * 4096 + 12
    large = Layout(DENSE, page_tokens=1 << 14)
    w = World(
        *(large, (large,), ProtocolConfig(), Staging(64, 2)),
        lambda block: block.tokens.first % 2 == 1,
    )
    w.open(ROOM)
    w.receive(ROOM, Request(num_tokens))
    w.run()
    # Notes of direct writes are lost until the close says them again.
    closing: list[bool] = []
    w.drops = lambda _, envelope: (
        isinstance(envelope.body, Arrived) and envelope.body.serial is None and not closing
    )
    for at in range(num_tokens):
        w.tell(S0, Push(ROOM, Span(at, at + 1)))
    w.run()
    closing.append(True)
    w.tell(S0, Finish(ROOM, num_tokens))
    w.run()
    assert w.outcomes(ROOM) == {"done"}
    (close,) = [body for body in w.where(Close) if isinstance(body, Close)][:1]
    assert len(close.written) == 4096
    w.finish()
