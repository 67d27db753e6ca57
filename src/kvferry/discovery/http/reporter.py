"""Sends an endpoint's status to the discovery service, for its page and ``kvferry top``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from kvferry.discovery.backoff import Backoff
from kvferry.discovery.http.calls import DiscoveryCalls, decoded
from kvferry.discovery.http.messages import rank_path
from kvferry.discovery.loop_thread import LoopThread
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.ids import Peer
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.status import EndpointStatus, ReportRequest

log = logging.getLogger("kvferry.discovery")

MakeView = Callable[[ReportRequest], Future[EndpointStatus]]

# The watchdog reports an endpoint loop that is busy for longer.
VIEW_S = 5.0
# Retry interval for a service that does not know views; a newer version may replace it.
UNSUPPORTED_S = 60.0
LEAVE_S = 1.0


class StatusReporter:
    """Sends an endpoint's view until ``close``, as often as the service asks for it.

    ``make`` is called on the reporter's own thread.
    """

    def __init__(
        self, url: str, key: ClusterKey | None, peer: Peer, incarnation: int, make: MakeView
    ) -> None:
        self._calls = DiscoveryCalls(url, key)
        self._peer = peer
        self._incarnation = incarnation
        self._make = make
        self._is_known = False
        self._task: asyncio.Task[None] | None = None
        self._thread = LoopThread("kvferry-status-reporter", self._finish)
        self._thread.do(self._begin)

    def close(self) -> None:
        """Remove the view, within a time limit, and end the thread. Idempotent."""
        self._thread.close()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        request, backoff = ReportRequest(), Backoff()
        while True:
            pause_s = 0.0
            try:
                async with asyncio.timeout(VIEW_S):
                    view = await asyncio.wrap_future(self._make(request))
                path = f"{rank_path(self._peer)}/view"
                answer = await self._calls.call("PUT", path, msgspec.json.encode(view))
                request = decoded(answer or b"{}", ReportRequest)
                self._is_known = True
                backoff.reset()
                if not (request.rooms or request.layout):
                    pause_s = request.every_s
            except DiscoveryError as error:
                log.debug("status-report-failed peer=%s fault=%s", self._peer, error.fault)
                is_unsupported = error.fault is DiscoveryFault.NOT_FOUND
                pause_s = UNSUPPORTED_S if is_unsupported else backoff.next_s()
            except TimeoutError:
                # The endpoint's loop is busy or has ended.
                pause_s = VIEW_S
            await asyncio.sleep(pause_s)

    async def _finish(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._is_known:
            path = f"{rank_path(self._peer)}/view?incarnation={self._incarnation}"
            # If this fails, the page shows the endpoint as silent for a while.
            with contextlib.suppress(DiscoveryError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._calls.call("DELETE", path)
        await self._calls.close()
