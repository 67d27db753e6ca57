"""Output of pairs with 2 ranks for 3 KV heads, which SGLang pads on a CPU."""

from __future__ import annotations

import pytest
from conftest import PaddedServers, Servers
from pairs import NUM_TOKENS, generate
from prompts import LONG, SHORT
from reference import Reference

PAIRS = {
    "2 to 1, page 16 to 16": ("prefill_tp2", "decode"),
    "1 to 2, page 1 to 1": ("prefill_tp1", "decode_tp2"),
    "2 to 2, page 16 to 1": ("prefill_tp2", "decode_tp2"),
}


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_output_equals_transformers(
    servers: Servers, padded: PaddedServers, reference: Reference, pair: str, text: str
) -> None:
    by_name = {**servers._asdict(), **padded._asdict()}
    prefill, decode = (by_name[name] for name in PAIRS[pair])
    prompt = reference.ids(text)
    answers = generate(prompt, prefill, decode)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
