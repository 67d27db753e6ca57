"""Reports of an endpoint's status to the discovery service, for its page and ``kvferry top``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from kvferry.discovery.calls import Backoff, Calls, decoded, path_of
from kvferry.discovery.loop import LoopThread
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.ids import Peer
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.status import EndpointStatus, ReportRequest

log = logging.getLogger("kvferry.discovery")

MakeView = Callable[[ReportRequest], Future[EndpointStatus]]

# An owner that is busy for longer is reported by the watchman.
VIEW_S = 5.0
# A discovery service that knows nothing of views may be replaced by one that does.
UNKNOWN_S = 60.0
LEAVE_S = 1.0


class StatusReporter:
    """Sends an endpoint's view until ``close``, as often as the discovery service asks for it.

    ``make`` is called on the reporter's own thread.
    """

    def __init__(
        self, url: str, key: ClusterKey | None, peer: Peer, incarnation: int, make: MakeView
    ) -> None:
        self._calls = Calls(url, key)
        self._peer = peer
        self._incarnation = incarnation
        self._make = make
        self._is_known = False
        self._task: asyncio.Task[None] | None = None
        self._thread = LoopThread("kvferry-status-reporter", self._finish)
        self._thread.do(self._begin)

    def close(self) -> None:
        """Say that the endpoint is no more, in bounded time, and end the thread. Idempotent."""
        self._thread.close()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        wishes, backoff = ReportRequest(), Backoff()
        while True:
            pause_s = 0.0
            try:
                async with asyncio.timeout(VIEW_S):
                    view = await asyncio.wrap_future(self._make(wishes))
                path = f"{path_of(self._peer)}/view"
                answer = await self._calls.call("PUT", path, msgspec.json.encode(view))
                wishes = decoded(answer or b"{}", ReportRequest)
                self._is_known = True
                backoff.reset()
                if not (wishes.rooms or wishes.layout):
                    pause_s = wishes.every_s
            except DiscoveryError as error:
                log.debug("status-report-failed peer=%s fault=%s", self._peer, error.fault)
                pause_s = UNKNOWN_S if error.fault is DiscoveryFault.NOT_FOUND else backoff.next_s()
            except TimeoutError:
                # The owner has much to do, or is gone and so are we soon.
                pause_s = VIEW_S
            await asyncio.sleep(pause_s)

    async def _finish(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._is_known:
            path = f"{path_of(self._peer)}/view?incarnation={self._incarnation}"
            # Otherwise the page shows it as silent for a while, and then forgets it.
            with contextlib.suppress(DiscoveryError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._calls.call("DELETE", path)
        await self._calls.close()
