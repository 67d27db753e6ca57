"""The HTTP backend: conformance, restarts of the service, and services without the key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from kvferry.discovery.base import Discovery
from kvferry.discovery.http.backend import HttpDiscovery
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.security.keys import ClusterKey
from kvferry.testing.discovery import DiscoverySuite

KEY = ClusterKey(bytes(range(32)))


class TestConformance(DiscoverySuite):
    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with DiscoveryServer() as server:
            self.url = server.url
            yield

    def make(self) -> Discovery:
        return HttpDiscovery(self.url)


async def fault_of(discovery: HttpDiscovery) -> DiscoveryFault:
    """Ask for an unknown instance and return the fault."""
    with pytest.raises(DiscoveryError) as error:
        await discovery.watch("nobody", "", 0.0)
    return error.value.fault


def test_a_restart_of_the_service_is_transparent() -> None:
    async def talk() -> list[DiscoveryFault]:
        with DiscoveryServer(key=KEY) as server:
            discovery, port = HttpDiscovery(server.url, KEY), urlsplit(server.url).port
            faults = [await fault_of(discovery), await fault_of(discovery)]
        assert port is not None
        with DiscoveryServer(port=port, key=KEY):
            faults.append(await fault_of(discovery))
            await discovery.close()
        return faults

    assert asyncio.run(talk()) == [DiscoveryFault.INCOMPLETE] * 3


@pytest.mark.parametrize(
    ("theirs", "told"),
    [(ClusterKey(bytes(32)), "another cluster key"), (None, "has no cluster key")],
    ids=["another key", "no key"],
)
def test_a_service_without_the_key_gets_no_request(theirs: ClusterKey | None, told: str) -> None:
    async def talk(url: str) -> None:
        discovery = HttpDiscovery(url, KEY)
        with pytest.raises(DiscoveryError, match=told) as error:
            await discovery.watch("nobody", "", 0.0)
        assert error.value.fault is DiscoveryFault.UNSIGNED
        await discovery.close()

    with DiscoveryServer(key=theirs) as server:
        asyncio.run(talk(server.url))
