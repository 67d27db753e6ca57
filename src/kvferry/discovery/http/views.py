"""Routes for endpoints' reports and for the page that shows them."""

from __future__ import annotations

from aiohttp import web

from kvferry.dashboard.routes import PageRoutes
from kvferry.discovery.http.cluster_status import InstanceStatusBoard
from kvferry.discovery.http.gate import (
    RANK_PATH,
    decoded,
    demand_same,
    incarnation_in,
    json_response,
    rank_in,
)
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.telemetry.status import EndpointStatus


class ViewRoutes:
    """Handlers that store reports in a board, and the page's."""

    def __init__(self, board: InstanceStatusBoard) -> None:
        self._board = board

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.put(f"{RANK_PATH}/view", self._put_view),
            web.delete(f"{RANK_PATH}/view", self._delete_view),
            *PageRoutes(self._board).routes(),
        ]

    async def _put_view(self, request: web.Request) -> web.Response:
        view = decoded(await request.read(), EndpointStatus)
        name, rank = rank_in(request)
        demand_same(view.name, f"{name}/{rank}")
        return json_response(self._board.take(view))

    async def _delete_view(self, request: web.Request) -> web.Response:
        name, rank = rank_in(request)
        if not self._board.leave(f"{name}/{rank}", incarnation_in(request)):
            raise DiscoveryError(
                DiscoveryFault.NO_LEASE,
                f"there is no view of this incarnation of {name}/{rank}; check the incarnation",
            )
        return web.Response(status=204)
