"""Output of pairs where two ranks share three KV heads."""

from __future__ import annotations

import pytest
from conftest import Cast, PaddedCast
from pairs import NUM_TOKENS, ask
from prompts import LONG, SHORT
from reference import Reference

PAIRS = {
    "2 to 1, page 16 to 16": ("two", "decode"),
    "1 to 2, page 1 to 1": ("one", "decode_two"),
    "2 to 2, page 16 to 1": ("two", "decode_two"),
}


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_output_equals_transformers(
    cast: Cast, padded: PaddedCast, reference: Reference, pair: str, text: str
) -> None:
    named = {**cast._asdict(), **padded._asdict()}
    prefill, decode = (named[name] for name in PAIRS[pair])
    prompt = reference.ids(text)
    answers = ask(prompt, prefill, decode)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
