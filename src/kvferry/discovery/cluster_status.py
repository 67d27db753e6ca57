"""The discovery service's lookout: what endpoints have told, with what the registry knows."""

from __future__ import annotations

import asyncio
import time

from kvferry.discovery.registry import InstanceRegistry
from kvferry.errors import Refused
from kvferry.layout.layout import Layout
from kvferry.plan.pictures import as_svg
from kvferry.plan.plan import Request
from kvferry.plan.reshard import reshard
from kvferry.telemetry.cluster import ClusterMonitor, Registered
from kvferry.telemetry.status import ClusterStatus, EndpointStatus, ReportRequest
from kvferry.telemetry.waterfall import Waterfall

# How long a trace is waited for: endpoints tell their views every few seconds.
STORY_S = 7.0
LOOK_S = 0.05
# A request of this length is drawn.
DRAWN = Request(8192)
# Workers register under this ending beside their ranks; it is no instance that sends.
HTTP_SUFFIX = "@http"


class DiscoveryStatus:
    """Belongs to the service's event loop."""

    def __init__(self, registry: InstanceRegistry) -> None:
        self._registry = registry
        self._book = ClusterMonitor()
        self._drawn: dict[tuple[Layout, Layout], str] = {}

    # ------------------------------------------------------------ what endpoints say

    def take(self, view: EndpointStatus) -> ReportRequest:
        """A view has come."""
        return self._book.take(view, time.monotonic())

    def leave(self, name: str, incarnation: int) -> bool:
        """An endpoint goes."""
        return self._book.leave(name, incarnation)

    def forget(self, now: float) -> None:
        """Let go of who is long gone."""
        self._book.forget(now)

    # ------------------------------------------------------------ what others ask

    async def look(self) -> ClusterStatus:
        """The cluster now."""
        now, wall = time.monotonic(), time.time()
        return self._book.status(registered(self._registry), now, wall, "discovery")

    async def waterfall(self, room: str) -> Waterfall | None:
        """A room's trace, once everybody who lives has told it, or time is over."""
        self._book.query_trace(room, time.monotonic())
        until = time.monotonic() + STORY_S
        while time.monotonic() < until and not self._book.is_answered(room, time.monotonic()):
            await asyncio.sleep(LOOK_S)
        return self._book.waterfall(room)

    async def plan(self, source: str, target: str) -> str:
        """The plan's picture of two instances."""
        layouts = self._layout(source), self._layout(target)
        if layouts not in self._drawn:
            if len(self._drawn) >= 16:
                del self._drawn[next(iter(self._drawn))]
            try:
                self._drawn[layouts] = as_svg(reshard(*layouts), DRAWN)
            except Refused as refused:
                raise LookupError(f"these two can't work together: {refused}") from None
        return self._drawn[layouts]

    def _layout(self, name: str) -> Layout:
        view = self._registry.resolve(name)
        layout = view.layout if view is not None else self._book.layout_of(name)
        if layout is None:
            raise LookupError(f"no rank of {name!r:.100} has said how it shards; check the name")
        return layout


def registered(registry: InstanceRegistry) -> list[Registered]:
    """Every instance that has registered to send."""
    return [
        Registered(
            name=one.name,
            complete=one.complete,
            note="" if one.complete else one.note,
            sharding=one.layout,
            transport=one.transport,
            num_ranks=one.num_ranks,
            ranks=registry.ranks_of(one.name),
        )
        for one in registry.summaries()
        if not one.name.endswith(HTTP_SUFFIX)
    ]
