"""A client signs for the life that a service is in, and notices when that is another."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from kvferry.discovery.http_backend import HttpDiscovery
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.discovery.server import DiscoveryServer
from kvferry.security.keys import ClusterKey

KEY = ClusterKey(bytes(range(32)))


async def fault_of(discovery: HttpDiscovery) -> DiscoveryFault:
    """Asks for an instance that nobody has; that there is none is the right answer."""
    with pytest.raises(DiscoveryError) as error:
        await discovery.watch("nobody", "", 0.0)
    return error.value.fault


def test_a_service_that_restarts_is_asked_in_its_new_life() -> None:
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
def test_a_service_that_can_t_prove_itself_is_told_nothing(
    theirs: ClusterKey | None, told: str
) -> None:
    async def talk(url: str) -> None:
        discovery = HttpDiscovery(url, KEY)
        with pytest.raises(DiscoveryError, match=told) as error:
            await discovery.watch("nobody", "", 0.0)
        assert error.value.fault is DiscoveryFault.UNSIGNED
        await discovery.close()

    with DiscoveryServer(key=theirs) as server:
        asyncio.run(talk(server.url))
