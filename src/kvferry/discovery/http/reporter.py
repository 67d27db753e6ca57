"""Sends an endpoint's status to the discovery or status service, for ``kvferry top`` and pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from kvferry.discovery.backoff import Backoff
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.http.calls import DiscoveryCalls, decoded
from kvferry.discovery.http.messages import rank_path
from kvferry.discovery.loop_thread import LoopThread
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.discovery.status_page import STATUS_NAME, status_url_in
from kvferry.errors import Misuse
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

    ``make`` is called on the reporter's own thread. Nothing is sent before ``report_to``.
    """

    def __init__(
        self, key: ClusterKey | None, peer: Peer, incarnation: int, make: MakeView
    ) -> None:
        self._key = key
        self._peer = peer
        self._incarnation = incarnation
        self._make = make
        self._url = ""
        self._may_be_known = False
        self._calls: DiscoveryCalls | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = LoopThread("kvferry-status-reporter", self._finish)

    def report_to(self, url: str) -> None:
        """Report to the service at this URL from now on. From any thread."""
        with contextlib.suppress(Misuse):
            self._thread.do(self._begin, url)

    def close(self) -> None:
        """Remove the view, within a time limit, and end the thread. Idempotent."""
        self._thread.close()

    def _begin(self, url: str) -> None:
        if url and url != self._url:
            self._url = url
            self._task = asyncio.get_running_loop().create_task(self._follow(self._task, url))

    async def _follow(self, previous: asyncio.Task[None] | None, url: str) -> None:
        """End the reports to the previous service and report to this one."""
        if previous is not None:
            previous.cancel()
            await asyncio.gather(previous, return_exceptions=True)
        if self._calls is not None:
            await self._calls.close()
        self._calls, self._may_be_known = DiscoveryCalls(url, self._key), False
        await self._run(self._calls)

    async def _run(self, calls: DiscoveryCalls) -> None:
        request, backoff = ReportRequest(), Backoff()
        while True:
            pause_s = 0.0
            try:
                async with asyncio.timeout(VIEW_S):
                    view = await asyncio.wrap_future(self._make(request))
                path = f"{rank_path(self._peer)}/view"
                # The service may store the view although ``close`` cancels the wait for its answer.
                self._may_be_known = True
                answer = await calls.call("PUT", path, msgspec.json.encode(view))
                request = decoded(answer or b"{}", ReportRequest)
                backoff.reset()
                if not request.rooms:
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
        if self._calls is None:
            return
        if self._may_be_known:
            path = f"{rank_path(self._peer)}/view?incarnation={self._incarnation}"
            # If this fails, the page shows the endpoint as silent for a while.
            with contextlib.suppress(DiscoveryError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._calls.call("DELETE", path)
        await self._calls.close()


def follow_status_service(client: DiscoveryClient, report_to: Callable[[str], None]) -> None:
    """Call back with the URL that takes reports: the discovery service's or a registered one."""
    if client.discovery.status_url:
        report_to(client.discovery.status_url)
    else:
        client.watch(STATUS_NAME, lambda view: report_to(status_url_in(view)))
