"""A thread that waits for copies on a GPU, so that nothing has to poll for them.

It sleeps in the driver until a copy has completed, with the GIL released. Copies on one stream
complete in the order in which they were launched, so waiting for one at a time is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvferry.transports.mailbox import Mailbox

T = TypeVar("T")


def gpu_failed(error: Exception) -> str:
    """Return the error text for copies on a GPU that has failed for good."""
    return f"the GPU failed ({type(error).__name__}: {error}); restart this process"


class _LaunchedCopy(NamedTuple, Generic[T]):
    item: T
    wait: Callable[[], None]


class CopyWaiter(Generic[T]):
    """Collects completed copies. Calls ``on_end`` on its own thread after each."""

    def __init__(self, on_end: Callable[[], None], name: str) -> None:
        self._on_end = on_end
        self._launched: Mailbox[_LaunchedCopy[T] | None] = Mailbox()
        self._ended: Mailbox[tuple[T, str]] = Mailbox()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, item: T, wait: Callable[[], None]) -> None:
        """Report ``item`` as ended once ``wait`` returns."""
        self._launched.put(_LaunchedCopy(item, wait))

    def ended(self) -> list[tuple[T, str]]:
        """Return the items that ended since the last call, each with an error text or ''."""
        return self._ended.drain(timeout_s=0)

    def close(self) -> None:
        """Wait for every launched copy, and end the thread."""
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (copy := self._launched.get()) is not None:
            problem = ""
            try:
                copy.wait()
            except Exception as error:  # CUDA errors, after which the GPU runs nothing more.
                problem = gpu_failed(error)
            self._ended.put((copy.item, problem))
            self._on_end()
