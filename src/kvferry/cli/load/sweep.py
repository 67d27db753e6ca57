"""A closed loop of requests at several concurrencies, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from kvferry.cli.load.client import LoadReply, ask, find_model, session_for
from kvferry.cli.load.prompts import FORMS, PromptForm, PromptGenerator
from kvferry.cli.load.stats import Level, summarise
from kvferry.errors import InputError, KvferryError

T = TypeVar("T")

# Refusals for reasons other than the form of the request.
FINAL = (401, 403, 408, 429)
LEAST_REQUESTS = 8
ROUNDS = 4


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load on an endpoint.

    ``requests`` is for each concurrency; None is four times the concurrency and at least eight.
    ``extra`` is added to every body.
    """

    concurrency: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    seed: int
    requests: int | None = None
    deadline_s: float = 300.0
    model: str | None = None
    extra: Mapping[str, Any] = {}

    @property
    def lengths(self) -> str:
        """The lengths of prompts and answers, for a title."""
        return f"{self.input_tokens} tokens in, {self.output_tokens} out"

    @property
    def settings(self) -> dict[str, Any]:
        """The lengths and the seed, for a JSON document."""
        names = ("input_tokens", "output_tokens", "seed")
        return {name: getattr(self, name) for name in names}

    def num_requests(self, concurrency: int) -> int:
        """Return the number of requests at this concurrency."""
        if self.requests is not None:
            return max(self.requests, concurrency)
        return max(LEAST_REQUESTS, ROUNDS * concurrency)


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load; ``form`` is the form of request that the endpoint accepted."""

    model: str
    form: str
    levels: list[Level]

    @property
    def failure(self) -> str | None:
        """A sentence about failed requests; None if every request was answered."""
        failed = sum(level.failed for level in self.levels)
        if not failed:
            return None
        asked = sum(level.requests for level in self.levels)
        first = next(level.first_failure for level in self.levels if level.failed)
        return f"{failed} of {asked} requests failed; the first: {first}"


class SweepWatcher(Protocol):
    """An observer of a sweep."""

    def level(self, concurrency: int, num_requests: int) -> None:
        """A concurrency begins."""

    def answered(self, reply: LoadReply) -> None:
        """One request has ended."""


def run_sweep(url: str, load: Load, watcher: SweepWatcher, *, api_key: str | None = None) -> Sweep:
    """Find an accepted form of request, warm up, then measure every concurrency.

    Raises ``KvferryError`` if the endpoint accepts no request.
    """

    async def run() -> Sweep:
        async with session_for(url, api_key=api_key) as session:
            model = load.model or await find_model(session)
            requests = _Requests(session, load, model)
            form = await requests.warm_up()
            levels: list[Level] = []
            for concurrency in load.concurrency:
                replies = await requests.level(form, concurrency, watcher)
                levels.append(summarise(concurrency, replies))
                if all(reply.error for reply in replies):
                    # The endpoint is gone; more requests would only wait for their deadlines.
                    break
            return Sweep(model=model, form=str(form), levels=levels)

    return asyncio.run(run())


class _Requests:
    """The requests to one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, load: Load, model: str) -> None:
        self._session = session
        self._load = load
        self._prompts = PromptGenerator(model, load.input_tokens, load.output_tokens, load.seed)

    async def warm_up(self) -> PromptForm:
        """Return the first form that the endpoint accepts; this also warms up connections."""
        refused: list[LoadReply] = []
        for form in FORMS:
            reply = await self._ask(form)
            if not reply.error:
                return form
            refused.append(reply)
            if not 400 <= reply.status < 500 or reply.status in FINAL:
                break
        # Later refusals follow from the first; a failure says more than a refusal.
        reply = refused[0] if 400 <= refused[-1].status < 500 else refused[-1]
        kind = InputError if reply.status < 500 and reply.status != 200 else KvferryError
        raise kind(f"the warm-up request failed: {reply.error}")

    async def _ask(self, form: PromptForm) -> LoadReply:
        body = {**self._prompts.body(form), **self._load.extra}
        reply = await ask(self._session, body, path=form.path, deadline_s=self._load.deadline_s)
        if not (reply.error or reply.stamps):
            reply.error = "the answer is empty"
        return reply

    async def level(
        self, form: PromptForm, concurrency: int, watcher: SweepWatcher
    ) -> list[LoadReply]:
        """Return all replies of one concurrency, in the order in which they ended."""
        num_requests = self._load.num_requests(concurrency)
        watcher.level(concurrency, num_requests)
        replies: list[LoadReply] = []

        async def ask_one(_: int) -> None:
            # None of the first requests was answered, so no other will be.
            if len(replies) < concurrency or not all(reply.error for reply in replies):
                replies.append(await self._ask(form))
                watcher.answered(replies[-1])

        await for_each(range(num_requests), concurrency, ask_one)
        return replies


async def for_each(
    items: Iterable[T], concurrency: int, do: Callable[[T], Awaitable[None]]
) -> None:
    """Call ``do`` with every item, in order, at most ``concurrency`` calls at once."""
    remaining = iter(items)

    async def worker() -> None:
        # The workers share one iterator.
        for item in remaining:
            await do(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
