"""Discovery by the built-in HTTP service (``server.py``): one request for each call."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from kvferry.discovery.base import Discovery
from kvferry.discovery.calls import CALL_S, Calls, decoded, path_of
from kvferry.discovery.records import InstanceView, RankRecord, Registration, Renewal, Summaries
from kvferry.security.keys import ClusterKey


class HttpDiscovery(Discovery):
    """The service at a URL. A restart of the service is noticed and costs one more request."""

    def __init__(self, url: str, key: ClusterKey | None = None) -> None:
        self._calls = Calls(url, key)

    def __str__(self) -> str:
        return self._calls.url

    async def register(self, record: RankRecord, lease_s: float) -> None:
        """Put the record."""
        body = msgspec.json.encode(Registration(record, lease_s))
        await self._calls.call("PUT", path_of(record.peer), body)

    async def renew(self, record: RankRecord, lease_s: float) -> None:
        """Put the lease."""
        body = msgspec.json.encode(Renewal(record.incarnation, lease_s))
        await self._calls.call("PUT", f"{path_of(record.peer)}/lease", body)

    async def withdraw(self, record: RankRecord) -> None:
        """Delete the record of this incarnation."""
        path = f"{path_of(record.peer)}?incarnation={record.incarnation}"
        await self._calls.call("DELETE", path)

    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        """Get the instance, by a request that the service answers when it has news."""
        query = f"?wait_s={wait_s:g}&version={quote(version, safe='')}"
        path = f"/v1/instances/{quote(name, safe='')}{query}"
        answer = await self._calls.call("GET", path, timeout_s=wait_s + CALL_S)
        return None if answer is None else decoded(answer, InstanceView)

    async def list(self) -> Summaries:
        """Get the list."""
        return decoded(await self._calls.call("GET", "/v1/instances") or b"", Summaries)

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()
