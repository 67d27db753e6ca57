"""Output of pairs with different sharding and page sizes."""

from __future__ import annotations

import pytest
from conftest import Servers
from kvferry_broken import WRONG
from pairs import NUM_TOKENS, generate, generate_all, new_room
from prompts import LONG, MANY, SHORT
from reference import Reference


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("prefill", ["prefill_tp1", "prefill_tp3"])
def test_greedy_output_equals_transformers(
    servers: Servers, reference: Reference, prefill: str, text: str
) -> None:
    """From TP1 with pages of 1 and TP3 with pages of 16, to TP1 with pages of 16."""
    prompt = reference.ids(text)
    answers = generate(prompt, getattr(servers, prefill), servers.decode)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
    assert answers.prefill["output_ids"] == answers.ids[:1]


def test_wrong_pages_change_the_output(servers: Servers, reference: Reference) -> None:
    """Negative control: with wrong bytes the comparison above fails."""
    prompt = reference.ids(LONG)
    answers = generate(prompt, servers.prefill_tp1, servers.decode, room=new_room() | WRONG)
    assert answers.ids[1:] != reference.answer(prompt, NUM_TOKENS)[1:]


def test_sixteen_concurrent_requests(servers: Servers, reference: Reference) -> None:
    prompts = [reference.ids(text) for text in MANY]
    answers = generate_all(prompts, servers.prefill_tp1, servers.decode)
    expected = [reference.answer(prompt, NUM_TOKENS) for prompt in prompts]
    assert [answer.ids for answer in answers] == expected
