"""A thread with its own event loop, for objects whose methods any thread may call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from kvferry.errors import Misuse

JOIN_S = 10.0


class LoopThread:
    """A daemon thread that runs an event loop until ``close``, and then ``finish``."""

    def __init__(self, name: str, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._finish = finish
        self._closed = threading.Event()
        self._stop = asyncio.Event()
        # The embedding process may have set another loop policy, such as uvloop's.
        self._loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def do(self, step: Callable[..., object], *args: Any) -> None:
        """Call ``step`` on the thread soon. Raises ``Misuse`` once the thread is closed."""
        closed = Misuse(f"{self._thread.name} is closed; make a new one")
        if self._closed.is_set():
            raise closed
        try:
            self._loop.call_soon_threadsafe(step, *args)
        except RuntimeError:
            # Closed meanwhile by another thread.
            raise closed from None

    def run(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Run a coroutine on the thread and wait for it. Raises its exception, or a timeout."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        """Stop the loop and join the thread, unless called on it. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._loop.call_soon_threadsafe(self._stop.set)
        if not self.is_current:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._stop.wait()
        await self._finish()
