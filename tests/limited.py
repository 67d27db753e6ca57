"""Async tests with a time limit."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

ENOUGH_S = 20.0


def bounded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Let pytest run an async test, for ``ENOUGH_S`` at most."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def within() -> None:
            async with asyncio.timeout(ENOUGH_S):
                await test(*args, **kwargs)

        asyncio.run(within())

    return run
