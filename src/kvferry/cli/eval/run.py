"""A run of a quiz: an endpoint is asked all questions, a few at once, and each outcome is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec

from kvferry.cli.eval.problems import Problem, Quiz
from kvferry.cli.eval.prompt import request_body
from kvferry.cli.eval.results import QuestionOutcome, judge
from kvferry.cli.load.client import CHAT, COMPLETIONS, ask, find_model, session_for
from kvferry.errors import InputError


class EvalEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asked, and how. Without ``model`` it is the first one that the endpoint lists."""

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    max_tokens: int = 512
    deadline_s: float = 600.0


class EvalWatcher:
    """Who looks on; does nothing by itself."""

    def begins(self, model: str) -> None:
        """The endpoint answers, and the first questions are about to be asked."""

    def ended(self, outcome: QuestionOutcome) -> None:
        """One question has its answer, or never will."""


async def run_quiz(
    quiz: Quiz, endpoint: EvalEndpoint, concurrency: int, watcher: EvalWatcher
) -> None:
    """Ask everything; cancelling it leaves what the watcher was told.

    ``InputError`` if a first request, of one token, is refused: then all others would be, too.
    """
    async with session_for(endpoint.url, api_key=endpoint.api_key) as session:
        model = endpoint.model or await find_model(session)
        examinee = _Examinee(session, endpoint, model, quiz.shots)
        await examinee.demand_answer(quiz.questions[0])
        watcher.begins(model)
        # Shared by all: whoever is free takes the next, so questions begin in order.
        waiting = iter(quiz.questions)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(quiz.questions))):
                    group.create_task(examinee.work(waiting, watcher.ended))
        except ExceptionGroup as errors:
            # Only a watcher raises, such as one whose disk is full; its first reason is enough.
            raise errors.exceptions[0] from None


class _Examinee:
    """One endpoint with its model and the shots that every prompt begins with."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: EvalEndpoint,
        model: str,
        shots: tuple[Problem, ...],
    ) -> None:
        self._session, self._endpoint = session, endpoint
        self._model, self._shots = model, shots
        self._path = CHAT if endpoint.chat else COMPLETIONS

    async def work(
        self, waiting: Iterator[Problem], ended: Callable[[QuestionOutcome], None]
    ) -> None:
        for problem in waiting:
            body = self._body(problem, self._endpoint.max_tokens)
            reply = await ask(
                self._session, body, path=self._path, deadline_s=self._endpoint.deadline_s
            )
            ended(judge(problem, reply))

    async def demand_answer(self, problem: Problem) -> None:
        """A wrong address, model or key, or too long a prompt, is told at once and once."""
        body = self._body(problem, 1)
        reply = await ask(
            self._session, body, path=self._path, deadline_s=self._endpoint.deadline_s
        )
        if reply.error:
            raise InputError(
                f"{self._endpoint.url} does not answer a first request for the model "
                f"{self._model!r}: {reply.error}; check --url, --model and --api-key"
            )

    def _body(self, problem: Problem, max_tokens: int) -> dict[str, Any]:
        return request_body(
            self._shots,
            problem.question,
            chat=self._endpoint.chat,
            model=self._model,
            max_tokens=max_tokens,
        )
