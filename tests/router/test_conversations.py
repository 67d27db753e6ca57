"""The table of holders, and the decision to pull."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.router.conversations import (
    Conversations,
    HolderChoice,
    PrefillReport,
    PullCosts,
    PullDecision,
    pieces_of,
)
from kvferry.router.options import PullOptions

# Any token is worth pulling.
FREE = PullOptions(fixed_s=0, token_s=0)
ALL = {"prefill-0", "prefill-1", "decode-0", "decode-1"}


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": messages} | fields


def test_the_next_turn_finds_the_one_that_answered() -> None:
    known = Conversations(FREE)
    known.remember(pieces_of(chat("one")), ("decode-0", "prefill-0"), 20)
    turn = pieces_of(chat("one", "long answer " * 9, "two"))
    assert known.choose(turn, "prefill-1", ALL) == HolderChoice(PullDecision.PULL, "decode-0")
    # It has computed the prompt itself, but not the answer.
    assert known.choose(turn, "prefill-0", ALL) == HolderChoice(PullDecision.PULL, "decode-0")
    # The one that answered is gone.
    assert known.choose(turn, "prefill-1", ALL - {"decode-0"}) == HolderChoice(
        PullDecision.PULL, "prefill-0"
    )
    assert known.choose(turn, "prefill-0", ALL - {"decode-0"}) == HolderChoice(PullDecision.HERE)
    assert known.choose(turn, "prefill-1", {"prefill-1"}) == HolderChoice(PullDecision.UNKNOWN)


def test_another_conversation_or_tenant_finds_nothing() -> None:
    known = Conversations(FREE)
    known.remember(pieces_of(chat("one", cache_salt="a")), ("decode-0",), 20)
    for body in (
        chat("One", "x", "two", cache_salt="a"),
        chat("one", "x", "two"),
        chat("one", "x", "two", cache_salt="b"),
        chat("one", "x", "two", cache_salt="a") | {"model": "other"},
    ):
        assert known.choose(pieces_of(body), "prefill-0", ALL).decision is PullDecision.UNKNOWN
    assert known.choose(
        pieces_of(chat("one", "x", "two", cache_salt="a")), "prefill-0", ALL
    ) == HolderChoice(PullDecision.PULL, "decode-0")


def test_a_history_without_its_reasoning_finds_the_common_beginning() -> None:
    known = Conversations(FREE)
    known.remember(pieces_of(chat("one")), ("decode-0",), 9)
    known.remember(pieces_of(chat("one", "<think> hm </think> 1", "two")), ("decode-1",), 9)
    stripped = pieces_of(chat("one", "1", "two", "2", "three"))
    # The later turn began with the same message, so its workers are the last that held it.
    assert known.choose(stripped, "prefill-0", ALL).holder == "decode-1"


@pytest.mark.parametrize("prompt", ["word " * 300, list(range(1000))])
def test_a_completion_that_goes_on_finds_its_beginning(prompt: Any) -> None:
    known = Conversations(FREE)
    known.remember(pieces_of({"prompt": prompt}), ("decode-0",), 16)
    longer = pieces_of({"prompt": prompt + prompt[:300]})
    assert known.choose(longer, "prefill-0", ALL) == HolderChoice(PullDecision.PULL, "decode-0")
    other = pieces_of({"prompt": prompt[1:]})
    assert known.choose(other, "prefill-0", ALL) == HolderChoice(PullDecision.UNKNOWN)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": 3}]
)
def test_several_prompts_have_no_pieces(body: dict[str, Any]) -> None:
    assert pieces_of(body) == []


def test_the_memory_is_bounded_and_forgets_the_least_recently_used() -> None:
    known = Conversations(PullOptions(fixed_s=0, token_s=0, max_pieces=4, max_bytes=1 << 20))
    for number in range(8):
        known.remember(pieces_of(chat(f"{number}")), ("decode-0",), 9)
        known.remember(pieces_of(chat("0")), ("decode-1",), 9)
        assert len(known) <= 4
    found = [
        known.choose(pieces_of(chat(f"{n}", "x")), "prefill-0", ALL).decision is PullDecision.PULL
        for n in range(8)
    ]
    assert found == [True, False, False, False, False, True, True, True]
    assert len(Conversations(PullOptions(max_bytes=0))) == 0
    few = Conversations(PullOptions(max_bytes=600))
    few.remember(pieces_of({"prompt": list(range(1000))}), ("decode-0",), 9)
    assert len(few) == 2


def test_a_pull_that_is_slower_than_computing_is_not_made() -> None:
    options = PullOptions(fixed_s=0.01, token_s=1e-5, compute_token_s=1e-4)
    known = Conversations(options)
    for num_tokens, decision in ((64, PullDecision.COMPUTE), (128, PullDecision.PULL)):
        prompt = list(range(num_tokens))
        known.remember(pieces_of({"prompt": prompt}), ("decode-0",), 0)
        turn = pieces_of({"prompt": [*prompt, *range(64)]})
        assert known.choose(turn, "prefill-0", ALL).decision is decision


def test_the_costs_follow_what_workers_report() -> None:
    costs = PullCosts(PullOptions(fixed_s=0.01, token_s=1e-5, compute_token_s=1e-4))
    assert costs.pays("prefill-0", 1000)
    usage = PrefillReport.Usage(prompt_tokens=1000)
    for _ in range(40):
        costs.learn("prefill-0", usage, PrefillReport.Own(compute_s=0.005))
    # 5 µs a token there, and still 100 µs at a worker that has said nothing.
    assert not costs.pays("prefill-0", 1000)
    assert costs.pays("prefill-1", 1000)
    for _ in range(40):
        costs.learn("prefill-1", usage, PrefillReport.Own(pulled=1000, pull_s=0.5))
    assert not costs.pays("prefill-1", 1000)
    for _ in range(40):
        costs.learn("prefill-1", usage, PrefillReport.Own(pulled=1000, pull_s=0.012))
        costs.learn("prefill-1", usage, PrefillReport.Own(pulled=16, pull_s=0.002))
    assert costs.pays("prefill-1", 1000)


def test_one_slow_pull_changes_little() -> None:
    """The first pull makes the connection, which takes a hundred times as long."""
    costs = PullCosts(PullOptions(fixed_s=0.01, token_s=1e-5, compute_token_s=1e-4))
    usage = PrefillReport.Usage(prompt_tokens=1000, prompt_tokens_details=None)
    costs.learn("prefill-0", usage, PrefillReport.Own(pulled=16, pull_s=1.0))
    costs.learn("prefill-0", usage, PrefillReport.Own(pulled=1000, pull_s=2.0))
    assert costs.pays("prefill-0", 300)


def test_the_size_of_a_token_follows_what_workers_report() -> None:
    known = Conversations(PullOptions(fixed_s=0.0, token_s=1e-5, compute_token_s=1e-5))
    text = chat("x" * 4000)
    assert pieces_of(text)[-1].size > 4000
    known.costs = PullCosts(PullOptions(fixed_s=0.1, token_s=0, compute_token_s=1e-4))
    known.remember(pieces_of(text), ("decode-0",), 0)
    turn = pieces_of(chat("x" * 4000, ""))
    assert known.choose(turn, "prefill-0", ALL).decision is PullDecision.PULL
    for _ in range(20):
        usage = PrefillReport.Usage(prompt_tokens=500)
        known.learn(pieces_of(text), "prefill-0", PrefillReport(usage))
    assert known.choose(turn, "prefill-0", ALL).decision is PullDecision.COMPUTE
