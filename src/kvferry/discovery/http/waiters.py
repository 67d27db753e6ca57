"""Requests that wait until an instance changes. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from kvferry.discovery.records import DiscoveryError, DiscoveryFault

MAX_WAITING = 8192


class Waiters:
    """Waiting requests by the name of their instance."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.num_waiting = 0
        self._closed = False

    async def wait(self, name: str, timeout_s: float) -> None:
        """Wait until ``wake(name)`` or the timeout. Raises ``FULL`` and ``STOPPING``."""
        if self.num_waiting >= MAX_WAITING:
            raise DiscoveryError(
                DiscoveryFault.FULL, f"{MAX_WAITING} requests are waiting; ask again later"
            )
        event = asyncio.Event()
        self._waiting[name].add(event)
        self.num_waiting += 1
        try:
            if not self._closed:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
        except TimeoutError:
            return
        finally:
            self.num_waiting -= 1
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]
        if self._closed:
            raise DiscoveryError(
                DiscoveryFault.STOPPING, "the discovery service is stopping; ask again later"
            )

    def wake(self, name: str) -> None:
        """Wake the requests that wait for this instance."""
        for event in self._waiting.get(name, ()):
            event.set()

    def close(self) -> None:
        """Wake every request; later ones do not wait."""
        self._closed = True
        for name in self._waiting:
            self.wake(name)
