"""What is sent."""

from __future__ import annotations

from decimal import Decimal

from kvferry.cli.eval.problems import Problem
from kvferry.cli.eval.prompt import INSTRUCTION, chat_messages, completion_text, request_body

SHOTS = (
    Problem(1, "1 + 1?", "2\n#### 2", Decimal(2)),
    Problem(2, "2 + 2?", "4\n#### 4", Decimal(4)),
)


def test_a_text_to_continue() -> None:
    assert completion_text(SHOTS, "3 + 3?") == (
        "Question: 1 + 1?\nAnswer: 2\n#### 2\n\n"
        "Question: 2 + 2?\nAnswer: 4\n#### 4\n\n"
        "Question: 3 + 3?\nAnswer:"
    )
    assert completion_text((), "3 + 3?") == "Question: 3 + 3?\nAnswer:"


def test_a_conversation() -> None:
    assert chat_messages(SHOTS[:1], "3 + 3?") == [
        {"role": "user", "content": f"1 + 1?\n\n{INSTRUCTION}"},
        {"role": "assistant", "content": "2\n#### 2"},
        {"role": "user", "content": f"3 + 3?\n\n{INSTRUCTION}"},
    ]


def test_bodies_have_only_what_every_server_takes() -> None:
    common = {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = request_body(SHOTS, "q", chat=False, model="m", max_tokens=9)
    text = completion_text(SHOTS, "q")
    assert body == common | {"prompt": text, "stop": ["Question:"]}
    body = request_body(SHOTS, "q", chat=True, model="m", max_tokens=9)
    assert body == common | {"messages": chat_messages(SHOTS, "q")}
