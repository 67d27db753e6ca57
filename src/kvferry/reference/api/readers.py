"""Readers of bodies: threads, few of them, with a short line in front.

Cutting a text into tokens takes a hundred times its bytes while it lasts. So large
bodies go one after the other and give their memory back, and small ones have
threads of their own: nobody with a question waits for somebody with a book.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvferry.http.api_errors import ApiError

T = TypeVar("T")

# A body above this is large: some sixteen thousand tokens.
LARGE_BYTES = 64 << 10


class ReaderThreads:
    """Some threads, and at most ``most`` calls that run in them or wait for one."""

    def __init__(self, name: str, num_threads: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kvferry-{name}")
        self._most = most
        self._num_calls = 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], T]) -> T:
        """What the call gives; an ``ApiError`` if too many wait already."""
        with self._lock:
            if self._num_calls >= self._most:
                message = "too many prompts wait to be read; ask again in a moment"
                raise ApiError(503, message, code="busy")
            self._num_calls += 1
        future = self._pool.submit(call)
        # A caller that leaves does not stop a thread, so the thread counts until it is done.
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def _done(self, future: Future[T]) -> None:
        with self._lock:
            self._num_calls -= 1

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class BodyReaders:
    """One for small bodies and one for large."""

    def __init__(self) -> None:
        self._small = ReaderThreads("small-bodies", num_threads=2, most=1024)
        self._large = ReaderThreads("large-bodies", num_threads=1, most=16)

    async def read(self, num_bytes: int, call: Callable[[], T]) -> T:
        """Have a body of that size read by ``call``."""
        if num_bytes <= LARGE_BYTES:
            return await self._small.run(call)
        return await self._large.run(lambda: _giving_back(call))

    def close(self) -> None:
        """Begin nothing more."""
        self._small.close()
        self._large.close()


def _giving_back(call: Callable[[], T]) -> T:
    try:
        return call()
    finally:
        give_back()


def give_back() -> None:
    """Return freed memory to the system, where the allocator would keep it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
