"""The ledger, compared with a set of cells."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import Layout, Parallel, Span, attention
from kvferry.plan import Block, Plan, Request, reshard
from kvferry.protocol.ledger import Ledger
from kvferry.testing.strategies import MAX_TOKENS, pairs

Piece = tuple[int, Block]


def owed(plan: Plan, target: int, request: Request) -> list[Piece]:
    return [
        (source, block)
        for source in plan.sources_of(target)
        for block in plan.blocks(source, target, request)
    ]


def cells(plan: Plan, piece: Piece) -> set[tuple[int, str, int, int]]:
    source, block = piece
    return {
        (source, block.group, layer, token)
        for layer in plan.spec.group(block.group).layers_in(block.layers)
        for token in range(block.tokens.first, block.tokens.end)
    }


@st.composite
def cut_up(draw: st.DrawFn, pieces: list[Piece]) -> list[Piece]:
    """Split blocks into pieces, repeat some, and shuffle them."""
    result: list[Piece] = []
    for source, block in pieces:
        cut = draw(st.integers(block.tokens.first, block.tokens.end))
        layer = draw(st.integers(block.layers.first, block.layers.end))
        result += [
            (source, Block(block.group, layers, tokens))
            for layers in (Span(block.layers.first, layer), Span(layer, block.layers.end))
            for tokens in (Span(block.tokens.first, cut), Span(cut, block.tokens.end))
        ]
    again = draw(st.lists(st.sampled_from(result), max_size=4)) if result else []
    return draw(st.permutations([*result, *again]))


@settings(max_examples=100, deadline=None)
@given(pairs(), st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS), st.data())
def test_complete_when_every_cell_has_arrived(
    pair: tuple[Layout, Layout], tokens: int, prefix: int, data: st.DataObject
) -> None:
    plan = reshard(*pair)
    request = Request(tokens, min(prefix, tokens))
    target = data.draw(st.integers(0, plan.target.num_ranks - 1))
    pieces = owed(plan, target, request)
    ledger = Ledger(plan, target, request)
    missing = set().union(*(cells(plan, piece) for piece in pieces))
    assert ledger.covered == (not missing)
    for source, block in data.draw(cut_up(pieces)):
        if not cells(plan, (source, block)):
            continue
        assert ledger.owes(source, block)
        ledger.add(source, block)
        missing -= cells(plan, (source, block))
        assert ledger.begun
        assert ledger.covered == (not missing)
        for one in plan.sources_of(target):
            assert ledger.missing(one) == len({c[:3] for c in missing if c[0] == one})
    assert ledger.covered


def test_blocks_that_are_not_owed() -> None:
    spec = attention(layers=4, kv_heads=2, head_dim=2)
    plan = reshard(Layout(spec, Parallel(pp=2)), Layout(spec))
    ledger = Ledger(plan, 0, Request(8, 2))
    good = Block("kv", Span(0, 2), Span(2, 8))
    assert ledger.owes(0, good)
    assert not ledger.owes(1, good), "another source's layers"
    assert not ledger.owes(0, Block("kv", Span(0, 3), Span(2, 8))), "one layer too many"
    assert not ledger.owes(0, Block("kv", Span(0, 2), Span(1, 8))), "a cached token"
    assert not ledger.owes(0, Block("kv", Span(0, 2), Span(2, 9))), "a token behind the end"
    assert not ledger.owes(0, Block("x", Span(0, 2), Span(2, 8))), "an unknown group"
    assert not ledger.owes(0, Block("kv", Span(9, 12), Span(2, 8))), "no layers at all"
    assert not ledger.owes(7, good), "an unknown source"


def test_repeated_source_does_not_stand_for_two() -> None:
    spec = attention(layers=2, kv_heads=2, head_dim=2)
    ledger = Ledger(reshard(Layout(spec, Parallel(tp=2)), Layout(spec)), 0, Request(4))
    block = Block("kv", Span(0, 2), Span(0, 4))
    ledger.add(0, block)
    ledger.add(0, block)
    assert not ledger.covered
    assert (ledger.missing(0), ledger.missing(1)) == (0, 2)
    ledger.add(1, block)
    assert ledger.covered
