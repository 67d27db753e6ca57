"""The demo's questions, asked through the router as any client would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

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
    """The reply to one question."""

    question: str


def ask_all(url: str, max_tokens: int, ended: Callable[[int, Answer], None]) -> list[Answer]:
    """Ask all questions at once; call ``ended`` with each answer and its number."""

    async def ask_one(session: aiohttp.ClientSession, number: int) -> Answer:
        answer = Answer(QUESTIONS[number])
        body = {
            "messages": [{"role": "user", "content": answer.question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            # An answer that was computed without a transfer would prove nothing.
            "kvferry": {"on_failure": "fail"},
        }
        await ask(session, body, deadline_s=REQUEST_S, into=answer)
        if not (answer.tokens or answer.error):
            answer.error = "the answer is empty"
        ended(number, answer)
        return answer

    async def ask_each() -> list[Answer]:
        async with session_for(url) as session:
            numbers = range(len(QUESTIONS))
            return await asyncio.gather(*(ask_one(session, number) for number in numbers))

    return asyncio.run(ask_each())
