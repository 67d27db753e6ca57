"""The router's page: its workers, the cluster, and access by token."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from limited import bounded
from router.fakes import Site, site
from telemetry.scenes import Scene

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.security.keys import ClusterKey
from kvferry.security.tokens import make_token


async def got(here: Site, path: str, **headers: str) -> tuple[int, Any]:
    async with here.http.get(f"{here.url}{path}", headers=headers) as response:
        data = await response.read()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(data) if is_json else data


@bounded
async def test_page_shows_the_cluster_and_the_routers_workers() -> None:
    with DiscoveryServer() as server:
        scene = Scene(server.url, {"p": 2}, {"d": 1})
        scene.tell()
        async with site(discovery=server.url) as here:
            _, view = await got(here, "/kvferry/cluster")
            assert view["served_by"] == "router"
            assert [one["name"] for one in view["instances"]] == ["p", "d"]
            assert {one["name"]: one["up"] for one in view["workers"]} == {"p0": True, "d0": True}
            status, page = await got(here, "/")
            assert (status, page[:15]) == (200, b"<!doctype html>")
            assert (await got(here, "/kvferry/plan?source=p&target=d"))[0] == 200
            assert (await got(here, "/kvferry/plan?source=p&target=x"))[0] == 404


@bounded
async def test_page_reports_a_missing_discovery_service() -> None:
    async with site() as here:
        _, view = await got(here, "/kvferry/cluster")
        assert "no discovery service" in view["problem"]
        assert len(view["workers"]) == 2
        assert (await got(here, "/kvferry/traces/17"))[0] == 404


@bounded
async def test_with_a_key_the_page_needs_a_token_and_the_api_none(tmp_path: Path) -> None:
    key = ClusterKey.new()
    key.write(tmp_path / "key")
    async with site(key=str(tmp_path / "key")) as here:
        status, error = await got(here, "/kvferry/cluster")
        assert (status, error["error"]["code"]) == (401, "token")
        token = make_token(key.http, time.time() + 60)
        assert (await got(here, "/kvferry/cluster", Authorization=f"Bearer {token}"))[0] == 200
        assert (await got(here, "/"))[0] == 200
        assert (await got(here, "/v1/models"))[0] == 200
