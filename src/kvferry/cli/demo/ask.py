"""The demo's questions, and asking them through the router as any client would."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.cli.load.client import LoadReply, ask, session_for

QUESTIONS = (
    "What is a ferry?",
    "What is the capital of France?",
    "Write a haiku about a river.",
    "Why is the sky blue? Answer in one sentence.",
    "A ferry crosses a river. On one bank three porters load the same ship, each with a third of "
    "the boxes; on the other bank a single porter unloads all of them. No box may be lost, none "
    "may be carried twice, and the porter on the far bank must be able to begin before the last "
    "box is on board. Some boxes are large and some are small, the porters do not know each "
    "other, and any of them may leave without a word. When the ship arrives, the porter counts "
    "the boxes against a list that was written before the first of them was lifted. What should "
    "the porter do when a box is missing? Answer in two sentences.",
)
REQUEST_S = 300.0


@dataclass(slots=True)
class Answer(LoadReply):
    """What came back for one question."""

    question: str


class AnswerWatcher(Protocol):
    """Who looks on while answers grow."""

    def grew(self, answers: Sequence[Answer]) -> None:
        """One of them has more text."""

    def ended(self, number: int, answer: Answer) -> None:
        """One of them is complete."""


def questions() -> list[Answer]:
    """An empty answer for each question."""
    return [Answer(question) for question in QUESTIONS]


def ask_all(
    url: str, answers: list[Answer], max_tokens: int, watcher: AnswerWatcher
) -> list[Answer]:
    """Ask everything at once, and wait for all of it."""
    asyncio.run(_ask_all(url, answers, max_tokens, watcher))
    return answers


async def _ask_all(
    url: str, answers: list[Answer], max_tokens: int, watcher: AnswerWatcher
) -> None:
    async with session_for(url) as session:

        async def ask_one(number: int, answer: Answer) -> None:
            await ask(
                session,
                _body(answer.question, max_tokens),
                deadline_s=REQUEST_S,
                grew=lambda _: watcher.grew(answers),
                into=answer,
            )
            if not (answer.tokens or answer.error):
                answer.error = "the answer is empty"
            watcher.ended(number, answer)

        await asyncio.gather(*(ask_one(i, answer) for i, answer in enumerate(answers)))


def _body(question: str, max_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        # A demo that quietly did without the transfer would show nothing.
        "kvferry": {"on_failure": "fail"},
    }
