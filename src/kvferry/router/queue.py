"""Requests that wait at the router until a worker can take them.

The first one to come is served first, unless only a later one fits the worker that has become free.
A queue is bounded in requests and in time. Beyond the bounds a client gets status 429.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from kvferry.http.api_errors import ApiError
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.worker_pool import AllFull, WorkerPool

T = TypeVar("T")

MAX_RETRY_AFTER_S = 60


class RequestQueue:
    """The waiting requests of one router. Belongs to its event loop."""

    def __init__(self, options: RouterOptions, pool: WorkerPool, metrics: RouterMetrics) -> None:
        self._options = options
        self._metrics = metrics
        # When each request began to wait, by the event that wakes it; in order of arrival.
        self._waiting: dict[asyncio.Event, float] = {}
        pool.on_change = self._wake_first

    async def admit(self, choose: Callable[[], T], until: float) -> T:
        """Return the result of ``choose`` once it does not raise ``AllFull``.

        The caller must count the request at its worker before it awaits anything. Raises
        ``ApiError`` with status 429 at the time ``until``, or at once if too many requests wait.
        """
        if not self._waiting:
            try:
                return choose()
            except AllFull:
                pass
        now = asyncio.get_running_loop().time()
        if len(self._waiting) >= self._options.max_queued or now >= until:
            raise self._refusal(now)
        turn = asyncio.Event()
        self._waiting[turn] = now
        self._metrics.queued.set(len(self._waiting))
        # A worker may have become free for a request that those before it cannot use.
        self._wake_first()
        try:
            async with asyncio.timeout_at(until):
                return await self._choose_in_turn(choose, turn)
        except TimeoutError:
            pass
        finally:
            del self._waiting[turn]
            self._metrics.queued.set(len(self._waiting))
            self._wake_first()
        raise self._refusal(until)

    async def _choose_in_turn(self, choose: Callable[[], T], turn: asyncio.Event) -> T:
        while True:
            await turn.wait()
            turn.clear()
            try:
                return choose()
            except AllFull:
                self._wake_after(turn)

    def _wake_first(self) -> None:
        if self._waiting:
            next(iter(self._waiting)).set()

    def _wake_after(self, turn: asyncio.Event) -> None:
        waiting = iter(self._waiting)
        for one in waiting:
            if one is turn:
                break
        if (following := next(waiting, None)) is not None:
            following.set()

    def _refusal(self, now: float) -> ApiError:
        """Return the error of a request that cannot wait, with the time after which to retry."""
        longest_s = now - min(self._waiting.values(), default=now)
        retry_s = min(max(1, math.ceil(longest_s)), MAX_RETRY_AFTER_S)
        message = (
            f"all workers are full, and {len(self._waiting)} requests wait; retry in {retry_s} s"
        )
        return ApiError(429, message, code="overloaded", retry_after_s=retry_s)
