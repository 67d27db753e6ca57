"""A thread that waits for copies on a GPU, so that nobody has to look again and again.

It sleeps in the driver until the GPU says that a copy is over, with Python's lock free.
Copies of one stream end in the order in which they were started, so one wait at a time
is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvferry.transports.mailbox import Mailbox

T = TypeVar("T")


def gpu_failed(error: Exception) -> str:
    """What is told of copies on a GPU that has failed."""
    return f"the GPU failed ({type(error).__name__}: {error}); restart this process"


class _Copy(NamedTuple, Generic[T]):
    what: T
    wait: Callable[[], None]


class Waiter(Generic[T]):
    """Tells of copies that are over. ``on_end`` is called on its thread."""

    def __init__(self, on_end: Callable[[], None], name: str) -> None:
        self._on_end = on_end
        self._started: Mailbox[_Copy[T] | None] = Mailbox()
        self._over: Mailbox[tuple[T, str]] = Mailbox()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, what: T, wait: Callable[[], None]) -> None:
        """Say when that wait has ended."""
        self._started.put(_Copy(what, wait))

    def ended(self) -> list[tuple[T, str]]:
        """What has ended since the last call, and what the GPU had to say against it."""
        return self._over.drain(timeout_s=0)

    def close(self) -> None:
        """Wait for all that was started, and end."""
        self._started.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._started.get()) is not None:
            problem = ""
            try:
                copy.wait()
            except Exception as error:  # Of CUDA, after which nothing runs on the GPU any more.
                problem = gpu_failed(error)
            self._over.put((copy.what, problem))
            self._on_end()
