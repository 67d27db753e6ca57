"""The demo's questions, and asking them through the router as any client would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec

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
class Answer:
    """What came back for one question. ``report`` is what decode says of its transfer."""

    question: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ttft_s: float | None = None
    total_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def take(self, chunk: dict[str, Any], seconds: float) -> None:
        """Add one event of its stream."""
        if "error" in chunk:
            self.error = str(chunk["error"].get("message", "no reason was given"))
            return
        self.report = chunk.get("kvferry") or self.report
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.tokens += choice.get("token_ids") or ()
            self.text += choice.get("delta", {}).get("content") or ""
        if self.ttft_s is None and self.tokens:
            self.ttft_s = seconds


class Watcher(Protocol):
    """Who looks on while answers grow."""

    def grew(self, answers: Sequence[Answer]) -> None:
        """One of them has more text."""

    def ended(self, number: int, answer: Answer) -> None:
        """One of them is complete."""


def questions() -> list[Answer]:
    """An empty answer for each question."""
    return [Answer(question) for question in QUESTIONS]


def ask_all(url: str, answers: list[Answer], max_tokens: int, watcher: Watcher) -> list[Answer]:
    """Ask everything at once, and wait for all of it."""
    asyncio.run(_ask_all(url, answers, max_tokens, watcher))
    return answers


async def _ask_all(url: str, answers: list[Answer], max_tokens: int, watcher: Watcher) -> None:
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:

        async def ask(number: int, answer: Answer) -> None:
            await _ask(session, answer, max_tokens, lambda: watcher.grew(answers))
            watcher.ended(number, answer)

        await asyncio.gather(*(ask(i, answer) for i, answer in enumerate(answers)))


async def _ask(session: aiohttp.ClientSession, answer: Answer, max_tokens: int, grew: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": answer.question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        # A demo that quietly did without the transfer would show nothing.
        "kvferry": {"on_failure": "fail"},
    }
    began = time.monotonic()
    try:
        async with session.post("/v1/chat/completions", json=body) as response:
            async for chunk in _events(response):
                answer.take(chunk, time.monotonic() - began)
                grew()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = str(error) or type(error).__name__
    answer.total_s = time.monotonic() - began
    if not (answer.tokens or answer.error):
        answer.error = "the answer is empty"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    if response.content_type != "text/event-stream":
        yield msgspec.json.decode(await response.read())
        return
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if data and data != b"[DONE]":
            yield msgspec.json.decode(data)
