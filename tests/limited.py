"""Async tests with a time limit."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

ENOUGH_S = 20.0
AsyncTest = Callable[..., Coroutine[Any, Any, None]]


class IdleTime(selectors.DefaultSelector):
    """Sums up the time in which an event loop had nothing to do but wait for a timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class IdleTimeLoop(asyncio.SelectorEventLoop):
    """An event loop by whose clock only waiting takes time."""

    def __init__(self) -> None:
        self._idle = IdleTime()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.now


def bounded(test: AsyncTest) -> Callable[..., None]:
    """Let pytest run an async test, for ``ENOUGH_S`` at most."""
    return _run_by(None, test)


def bounded_by_idle_time(test: AsyncTest) -> Callable[..., None]:
    """Like ``bounded``, but no timeout ends because the machine is busy.

    For tests whose clients and servers all run in the test's own event loop.
    """
    return _run_by(IdleTimeLoop, test)


def _run_by(
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None, test: AsyncTest
) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(ENOUGH_S):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(within())

    return run
