"""Discovery by the built-in HTTP service (``server.py``): one request for each call."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from kvferry.discovery.base import Discovery
from kvferry.discovery.http.calls import CALL_S, DiscoveryCalls, decoded
from kvferry.discovery.http.messages import Registration, Renewal, rank_path
from kvferry.discovery.records import InstanceView, RankRecord, Summaries
from kvferry.security.keys import ClusterKey


class HttpDiscovery(Discovery):
    """The service at a URL. A restart of the service costs one more request."""

    def __init__(self, url: str, key: ClusterKey | None = None) -> None:
        self._calls = DiscoveryCalls(url, key)

    def __str__(self) -> str:
        return self._calls.url

    async def register(self, record: RankRecord, lease_s: float) -> None:
        """PUT the record."""
        body = msgspec.json.encode(Registration(record, lease_s))
        await self._calls.call("PUT", rank_path(record.peer), body)

    async def renew(self, record: RankRecord, lease_s: float) -> None:
        """PUT the lease."""
        body = msgspec.json.encode(Renewal(record.incarnation, lease_s))
        await self._calls.call("PUT", f"{rank_path(record.peer)}/lease", body)

    async def withdraw(self, record: RankRecord) -> None:
        """DELETE the record of this incarnation."""
        path = f"{rank_path(record.peer)}?incarnation={record.incarnation}"
        await self._calls.call("DELETE", path)

    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        """GET the instance with long polling."""
        query = f"?wait_s={wait_s:g}&version={quote(version, safe='')}"
        path = f"/v1/instances/{quote(name, safe='')}{query}"
        answer = await self._calls.call("GET", path, timeout_s=wait_s + CALL_S)
        return None if answer is None else decoded(answer, InstanceView)

    async def list(self) -> Summaries:
        """GET the list."""
        return decoded(await self._calls.call("GET", "/v1/instances") or b"", Summaries)

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()
