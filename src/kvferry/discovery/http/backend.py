"""Discovery by the built-in HTTP service (``server.py``): one request for each call."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from kvferry.discovery.base import Discovery
from kvferry.discovery.http.calls import CALL_S, DiscoveryCalls, decoded
from kvferry.discovery.http.messages import LongerLease, Registration, Renewal, rank_path
from kvferry.discovery.records import InstanceView, RankRecord, Summaries
from kvferry.security.keys import ClusterKey

# Short enough that a restarted service, which starts empty, is complete again before it settles.
MOST_RENEWAL_S = 5.0


class HttpDiscovery(Discovery):
    """The service at a URL. A restart of the service costs one more request."""

    def __init__(self, url: str, key: ClusterKey | None = None) -> None:
        self._calls = DiscoveryCalls(url, key)
        self._listed = Summaries(())

    def __str__(self) -> str:
        return self._calls.url

    @property
    def status_url(self) -> str:
        """The service itself."""
        return self._calls.url

    async def register(self, record: RankRecord, lease_s: float) -> None:
        """PUT the record."""
        body = msgspec.json.encode(Registration(record, lease_s))
        await self._calls.call("PUT", rank_path(record.peer), body)

    async def renew(self, record: RankRecord, lease_s: float) -> float:
        """PUT the lease."""
        body = msgspec.json.encode(Renewal(record.incarnation, lease_s))
        answer = await self._calls.call("PUT", f"{rank_path(record.peer)}/lease", body)
        if answer:
            return decoded(answer, LongerLease).lease_s / 3
        return min(lease_s / 3, MOST_RENEWAL_S)

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
        """GET the list if it has changed since the last call."""
        query = f"?version={quote(self._listed.version, safe='')}"
        answer = await self._calls.call("GET", f"/v1/instances{query}")
        if answer is not None:
            self._listed = decoded(answer, Summaries)
        return self._listed

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()
