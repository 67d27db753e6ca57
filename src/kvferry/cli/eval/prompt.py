"""A question's prompt: a few-shot text to continue, or a conversation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.cli.eval.problems import Problem

# A base model goes on with a question of its own after its answer.
STOPS = ("Question:",)
# In every turn of the user and not in a system message, which some templates refuse.
INSTRUCTION = "Think step by step. End with a line that has #### and then only the number."


def completion_text(shots: Sequence[Problem], question: str) -> str:
    """The usual form: shots, then the question, to be continued behind ``Answer:``."""
    worked = (f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{''.join(worked)}Question: {question}\nAnswer:"


def chat_messages(shots: Sequence[Problem], question: str) -> list[dict[str, str]]:
    """Every shot is a turn of the user and one of the assistant."""
    messages = []
    for shot in shots:
        messages.append(_user(shot.question))
        messages.append({"role": "assistant", "content": shot.answer})
    return [*messages, _user(question)]


def _user(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}


def request_body(
    shots: Sequence[Problem], question: str, *, chat: bool, model: str, max_tokens: int
) -> dict[str, Any]:
    """A greedy, streamed request; only fields that every server with this API takes."""
    asked: dict[str, Any]
    if chat:
        asked = {"messages": chat_messages(shots, question)}
    else:
        asked = {"prompt": completion_text(shots, question), "stop": list(STOPS)}
    return {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked,
    }
