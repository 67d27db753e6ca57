"""A closed loop at one concurrency after the other: whoever has an answer asks the next question.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import msgspec

from kvferry.cli.load.client import LoadReply, ask, find_model, session_for
from kvferry.cli.load.prompts import FORMS, Asker, PromptForm
from kvferry.cli.load.stats import Level, summarise
from kvferry.errors import InputError, KvferryError

# Refusals that another form of the question would not mend.
FINAL = (401, 403, 408, 429)
LEAST_REQUESTS = 8
ROUNDS = 4


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of an endpoint.

    ``requests`` is for each concurrency; None is four for each that is under way, and at least
    eight. ``extra`` goes into every body.
    """

    concurrency: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    seed: int
    requests: int | None = None
    deadline_s: float = 300.0
    model: str | None = None
    extra: Mapping[str, Any] = {}

    def num_requests(self, concurrency: int) -> int:
        """How many are asked while so many are under way."""
        if self.requests is not None:
            return max(self.requests, concurrency)
        return max(LEAST_REQUESTS, ROUNDS * concurrency)


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. ``form`` is how the endpoint had to be asked."""

    model: str
    form: str
    levels: list[Level]

    @property
    def failure(self) -> str | None:
        """What went wrong, as a sentence; None if every request was answered."""
        failed = sum(level.failed for level in self.levels)
        if not failed:
            return None
        asked = sum(level.requests for level in self.levels)
        first = next(level.first_failure for level in self.levels if level.failed)
        return f"{failed} of {asked} requests failed; the first: {first}"


class SweepWatcher(Protocol):
    """Who looks on while it runs."""

    def level(self, concurrency: int, num_requests: int) -> None:
        """A concurrency begins."""

    def answered(self, reply: LoadReply) -> None:
        """One request has ended."""


def run_sweep(url: str, load: Load, watcher: SweepWatcher, *, api_key: str | None = None) -> Sweep:
    """Measure an endpoint. Raises ``KvferryError`` with a sentence if it takes no request."""

    async def run() -> Sweep:
        async with session_for(url, api_key=api_key) as session:
            return await sweep(session, load, watcher)

    return asyncio.run(run())


async def sweep(session: aiohttp.ClientSession, load: Load, watcher: SweepWatcher) -> Sweep:
    """Find out how to ask, warm the endpoint up, then measure every concurrency."""
    model = load.model or await find_model(session)
    asker = Asker(model, load.input_tokens, load.output_tokens, load.seed)
    runner = _Runner(session, load, asker, watcher)
    form = await runner.warm_up()
    levels: list[Level] = []
    for concurrency in load.concurrency:
        level = summarise(concurrency, await runner.level(form, concurrency))
        levels.append(level)
        if level.failed == level.requests:
            # It is gone; asking on would only wait for more deadlines.
            break
    return Sweep(model=model, form=str(form), levels=levels)


class _Runner:
    """Asks one endpoint."""

    def __init__(
        self, session: aiohttp.ClientSession, load: Load, asker: Asker, watcher: SweepWatcher
    ) -> None:
        self._session = session
        self._load = load
        self._asker = asker
        self._watcher = watcher

    async def warm_up(self) -> PromptForm:
        """The first form that the endpoint takes; connections and code paths are then warm."""
        refused: list[LoadReply] = []
        for form in FORMS:
            reply = await self._ask(form)
            if not reply.error:
                return form
            refused.append(reply)
            if not 400 <= reply.status < 500 or reply.status in FINAL:
                break
        # The others are consequences; but a failure says more than a refusal.
        reply = refused[0] if 400 <= refused[-1].status < 500 else refused[-1]
        kind = InputError if reply.status < 500 and reply.status != 200 else KvferryError
        raise kind(f"the warm-up request failed: {reply.error}")

    async def _ask(self, form: PromptForm) -> LoadReply:
        body = {**self._asker.body(form), **self._load.extra}
        reply = await ask(self._session, body, path=form.path, deadline_s=self._load.deadline_s)
        if not (reply.error or reply.stamps):
            reply.error = "the answer is empty"
        return reply

    async def level(self, form: PromptForm, concurrency: int) -> list[LoadReply]:
        """All replies of one concurrency, in the order in which they ended."""
        num_requests = self._load.num_requests(concurrency)
        self._watcher.level(concurrency, num_requests)
        replies: list[LoadReply] = []
        numbers = iter(range(num_requests))

        async def keep_asking() -> None:
            for _ in numbers:
                replies.append(await self._ask(form))
                self._watcher.answered(replies[-1])
                if _is_hopeless(replies, concurrency):
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(keep_asking())
        return replies


def _is_hopeless(replies: list[LoadReply], concurrency: int) -> bool:
    """Whether everybody has asked once and nobody was answered."""
    return len(replies) >= concurrency and all(reply.error for reply in replies)
