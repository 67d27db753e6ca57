"""Output of pairs with different sharding and page sizes."""

from __future__ import annotations

import pytest
from conftest import Cast
from kvferry_broken import WRONG
from pairs import NUM_TOKENS, ask, ask_all, new_room
from prompts import LONG, MANY, SHORT
from reference import Reference


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("prefill", ["one", "three"])
def test_greedy_output_equals_transformers(
    cast: Cast, reference: Reference, prefill: str, text: str
) -> None:
    """TP1 in pages of 1 and TP3 in pages of 16, to TP1 in pages of 16."""
    prompt = reference.ids(text)
    answers = ask(prompt, getattr(cast, prefill), cast.decode)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
    assert answers.prefill["output_ids"] == answers.ids[:1]


def test_wrong_pages_change_the_output(cast: Cast, reference: Reference) -> None:
    """The negative control: with wrong bytes the comparison above fails."""
    prompt = reference.ids(LONG)
    answers = ask(prompt, cast.one, cast.decode, room=new_room() | WRONG)
    assert answers.ids[1:] != reference.answer(prompt, NUM_TOKENS)[1:]


def test_sixteen_concurrent_requests(cast: Cast, reference: Reference) -> None:
    prompts = [reference.ids(text) for text in MANY]
    answers = ask_all(prompts, cast.one, cast.decode)
    assert [each.ids for each in answers] == [reference.answer(p, NUM_TOKENS) for p in prompts]
