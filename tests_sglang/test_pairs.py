"""Answers of pairs whose two sides shard and page the cache differently."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from conftest import CHUNK, Starter
from kvferry_broken import WRONG
from pairs import NUM_TOKENS, ask, ask_all, new_room
from prompts import LONG, MANY, SHORT
from reference import Reference
from servers import Server, Side


class Cast(NamedTuple):
    """Any of these prefill servers goes with any of the decode servers."""

    one: Server
    two: Server
    three: Server
    decode: Server
    decode_two: Server


@pytest.fixture(scope="module")
def cast(servers: Starter) -> Cast:
    """TP2 does not divide the model's 3 KV heads: SGLang pads them, and the padding stays there."""
    return Cast(
        *servers(
            Side(role="prefill", flags=CHUNK),
            Side(role="prefill", tp=2, page=16, flags=CHUNK),
            Side(role="prefill", tp=3, page=16, flags=CHUNK),
            Side(role="decode", page=16),
            Side(role="decode", tp=2, page=1),
        )
    )


PAIRS = {
    "1 to 1, page 1 to 16": ("one", "decode"),
    "1 to 2, page 1 to 1": ("one", "decode_two"),
    "2 to 1, page 16 to 16": ("two", "decode"),
    "2 to 2, page 16 to 1": ("two", "decode_two"),
    "3 to 1, page 16 to 16": ("three", "decode"),
    "3 to 2, page 16 to 1": ("three", "decode_two"),
}


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_answers_are_those_of_transformers(
    cast: Cast, reference: Reference, pair: str, text: str
) -> None:
    prefill, decode = (getattr(cast, name) for name in PAIRS[pair])
    prompt = reference.ids(text)
    answers = ask(prompt, prefill, decode)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
    assert answers.prefill["output_ids"] == answers.ids[:1]


def test_pages_in_the_wrong_order_are_noticed(cast: Cast, reference: Reference) -> None:
    """The negative control: with wrong bytes the comparison above fails."""
    prompt = reference.ids(LONG)
    answers = ask(prompt, cast.one, cast.decode, room=WRONG + new_room())
    assert answers.ids[1:] != reference.answer(prompt, NUM_TOKENS)[1:]


def test_sixteen_at_once(cast: Cast, reference: Reference) -> None:
    prompts = [reference.ids(text) for text in MANY]
    answers = ask_all(prompts, cast.one, cast.decode)
    assert [each.ids for each in answers] == [reference.answer(p, NUM_TOKENS) for p in prompts]
