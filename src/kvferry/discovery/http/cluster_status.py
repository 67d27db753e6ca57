"""The state of the cluster for the page, from the reports of its endpoints."""

from __future__ import annotations

import asyncio
import time

from kvferry.errors import Refused
from kvferry.layout.layout import Layout
from kvferry.plan.pictures import as_svg
from kvferry.plan.plan import Request
from kvferry.plan.reshard import reshard
from kvferry.telemetry.cluster import ClusterMonitor
from kvferry.telemetry.status import ClusterStatus, EndpointStatus, ReportRequest
from kvferry.telemetry.waterfall import Waterfall

# How long to wait for the parts of a trace. Endpoints report every few seconds.
TRACE_TIMEOUT_S = 7.0
POLL_S = 0.05
# The request whose plan is drawn.
DRAWN = Request(8192)
MAX_DRAWN = 16


class InstanceStatusBoard:
    """Endpoints' reports, and answers to the page. Belongs to the service's event loop."""

    def __init__(self, served_by: str) -> None:
        self._served_by = served_by
        self._cluster = ClusterMonitor()
        self._drawn: dict[tuple[Layout, Layout], str] = {}

    # ------------------------------------------------------------ reports of endpoints

    def take(self, view: EndpointStatus) -> ReportRequest:
        """Store an endpoint's report, and return what the next one should contain."""
        return self._cluster.take(view, time.monotonic())

    def leave(self, name: str, incarnation: int) -> bool:
        """Remove an endpoint that has closed; return whether it was known."""
        return self._cluster.leave(name, incarnation)

    def forget(self, now: float) -> None:
        """Drop endpoints that have been silent for long."""
        self._cluster.forget(now)

    # ------------------------------------------------------------ questions of the page

    async def look(self) -> ClusterStatus:
        """Return the current state of the cluster."""
        return self._cluster.status(time.monotonic(), time.time(), self._served_by)

    async def waterfall(self, room: str) -> Waterfall | None:
        """Return a room's trace once every live endpoint has reported it, or after a timeout."""
        self._cluster.query_trace(room, time.monotonic())
        deadline = time.monotonic() + TRACE_TIMEOUT_S
        while time.monotonic() < deadline and not self._cluster.is_answered(room, time.monotonic()):
            await asyncio.sleep(POLL_S)
        return self._cluster.waterfall(room)

    async def plan(self, source: str, target: str) -> str:
        """Return the plan of two instances as SVG. Raises ``LookupError``."""
        layouts = self._layout(source), self._layout(target)
        if layouts not in self._drawn:
            if len(self._drawn) >= MAX_DRAWN:
                del self._drawn[next(iter(self._drawn))]
            try:
                self._drawn[layouts] = as_svg(reshard(*layouts), DRAWN)
            except Refused as refused:
                raise LookupError(f"these two cannot work together: {refused}") from None
        return self._drawn[layouts]

    def _layout(self, name: str) -> Layout:
        layout = self._cluster.layout_of(name)
        if layout is None:
            raise LookupError(f"no rank of {name!r:.100} has reported its layout; check the name")
        return layout
