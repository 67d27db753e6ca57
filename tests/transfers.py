"""Random transfers for property tests."""

from __future__ import annotations

from hypothesis import strategies as st
from moving import MOVERS

from kvferry.plan import Plan, Request, reshard
from kvferry.testing.strategies import MAX_TOKENS, pairs


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Plan, Request, int, str]:
    """Draw a plan, a request, a seed for its content, and a way to move it."""
    source, target = draw(pairs())
    num_tokens = draw(st.integers(1, MAX_TOKENS))
    request = Request(num_tokens, draw(st.integers(0, num_tokens)))
    seed, mover = draw(st.integers(0, 2**32)), draw(st.sampled_from(sorted(MOVERS)))
    return reshard(source, target), request, seed, mover
