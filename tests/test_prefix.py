"""The digest chain finds the longest common prefix of two sequences without their tokens."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry
from kvferry.errors import InputError
from kvferry.prefix import (
    MAX_SHORT_CHAIN,
    MAX_SPANS,
    SHORT_BYTES,
    SPAN_TOKENS,
    PrefixChain,
    chain_tokens,
    checked_short_chain,
    common_tokens,
    prefix_chain,
)
from kvferry.protocol.codec import MAX_FRAME_BYTES

IDS = st.integers(0, 3)
SEQUENCES = st.lists(IDS, max_size=5 * SPAN_TOKENS)


def chain(tokens: Any, **changed: Any) -> PrefixChain:
    settings: dict[str, Any] = {"model": "m", "dtype": "bf16"}
    return prefix_chain(tokens, **settings | changed)


def same_tokens(one: list[int], two: list[int]) -> int:
    """Return the length of the longest common prefix, counted token by token."""
    pairs = zip(one, two, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_the_common_prefix_is_that_of_the_tokens(
    start: list[int], one: list[int], two: list[int]
) -> None:
    one, two = start + one, start + two
    expected = same_tokens(one, two) // SPAN_TOKENS * SPAN_TOKENS
    assert chain(one).common_tokens(chain(two).short) == expected
    assert chain(two).common_tokens(chain(one).short) == expected
    if expected:
        assert chain(one).digest(expected) == chain(two).digest(expected)


@given(SEQUENCES, st.data())
def test_a_changed_token_cuts_the_prefix(tokens: list[int], data: st.DataObject) -> None:
    tokens += [0] * SPAN_TOKENS
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    whole = len(tokens) // SPAN_TOKENS
    expected = min(whole, at // SPAN_TOKENS) * SPAN_TOKENS
    assert chain(tokens).common_tokens(chain(changed).short) == expected


@given(SEQUENCES, st.integers(-5, 6 * SPAN_TOKENS))
def test_the_chain_of_a_prefix_is_a_prefix_of_the_chain(tokens: list[int], count: int) -> None:
    whole = chain(tokens)
    assert whole.num_tokens == chain_tokens(whole.short) == len(tokens) // SPAN_TOKENS * SPAN_TOKENS
    assert whole.first(count) == chain(tokens[: max(0, count)])
    assert whole.short.startswith(whole.first(count).short)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_any_bytes_are_compared(one: bytes, two: bytes) -> None:
    """A peer may send anything. The answer is a number of tokens within both chains."""
    count = common_tokens(one, two)
    assert 0 <= count <= min(chain_tokens(one), chain_tokens(two))
    assert count % SPAN_TOKENS == 0


@pytest.mark.parametrize(
    "changed",
    [{"model": "n"}, {"dtype": "fp32"}, {"adapters": ["lora"]}, {"extra": {"salt": "tenant"}}],
    ids=["model", "dtype", "adapters", "salt"],
)
def test_another_computation_has_nothing_in_common(changed: dict[str, Any]) -> None:
    tokens = range(3 * SPAN_TOKENS)
    assert chain(tokens, **changed).common_tokens(chain(tokens).short) == 0


def test_the_chain_is_public_and_stays_as_it_is() -> None:
    """Two versions of two instances must agree on it."""
    assert kvferry.prefix_chain is prefix_chain
    assert (
        chain(range(40)).digest(32).hex()
        == "6f7262a31f46f2dcb9ab6731ce867698b895e069e143cba010c43a93f0b56400"
    )
    assert chain(np.arange(40, dtype=np.int32)) == chain(range(40))


def test_the_chain_of_a_million_tokens_fits_a_frame() -> None:
    short = chain(np.arange(1 << 20)).short
    assert len(short) == (1 << 20) // SPAN_TOKENS * SHORT_BYTES < MAX_FRAME_BYTES // 8
    assert checked_short_chain(short) == short


def test_a_longer_sequence_has_no_longer_chain() -> None:
    tokens = np.zeros((MAX_SPANS + 1) * SPAN_TOKENS, np.int64)
    assert chain(tokens).num_tokens == MAX_SPANS * SPAN_TOKENS
    assert len(chain(tokens).short) == MAX_SHORT_CHAIN < MAX_FRAME_BYTES


@pytest.mark.parametrize("tokens", [0, 1, SPAN_TOKENS + 1, 3 * SPAN_TOKENS, -SPAN_TOKENS])
def test_there_is_a_digest_only_at_whole_spans(tokens: int) -> None:
    with pytest.raises(InputError, match="ask at a multiple of 16"):
        chain(range(40)).digest(tokens)


@pytest.mark.parametrize("short", [b"", b"1234567", bytes(MAX_SHORT_CHAIN + SHORT_BYTES)])
def test_a_chain_that_no_frame_can_carry_is_refused(short: bytes) -> None:
    with pytest.raises(InputError, match="a short chain has"):
        checked_short_chain(short)
