"""Rooms between endpoints that find each other in a real etcd cluster, which fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from discovery.etcd_cluster import READY_S, EtcdCluster
from discovery.test_endpoints_with_a_static_list import (
    LAYOUT,
    WAIT_S,
    carry,
    source_at,
    target_with,
)
from endpoint.fleets import eventually

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.etcd import EtcdDiscovery
from kvferry.discovery.records import DiscoveryFault, RankRecord
from kvferry.protocol.outcome import Done
from kvferry.testing.discovery import lives, refused


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path) as running:
        yield running


RESTART_S = 2 * READY_S


def stop(cluster: EtcdCluster) -> None:
    for member in cluster.members:
        member.kill()


def test_rooms_in_flight_are_untouched_and_new_ones_wait_while_etcd_is_away(
    cluster: EtcdCluster,
) -> None:
    url = cluster.url("k")
    with source_at(0, url) as source, target_with(url) as (target, pages):
        assert carry(source, target, "before") == Done(b"token")
        flying = target.receive("flying", prefill="p", tokens=8, pages=[3, 1])
        out = source.open("flying")
        out.push((0, 4), [0])
        stop(cluster)
        out.push((4, 8), [1])
        out.close(b"later")
        assert flying.wait(WAIT_S) == Done(b"later")
        # The two know each other, so they need no discovery.
        assert carry(source, target, "known") == Done(b"token")
        assert (pages[[3, 1]] == 7).all()
        # A restart of etcd takes seconds on a busy machine, and a rank may have to register again.
        with target_with(url, discovery_timeout_s=RESTART_S) as (stranger, _):
            into = stranger.receive(
                "new", prefill="p", tokens=8, pages=[3, 1], deadline_s=RESTART_S
            )
            out = source.open("new", deadline_s=RESTART_S)
            out.push((0, 8), [0, 1])
            out.close(b"found")
            assert into.outcome is None
            cluster.start()
            assert into.wait(RESTART_S) == Done(b"found")


def test_a_stale_record_is_never_connected_to(cluster: EtcdCluster) -> None:
    """A process died without leaving, and its lease goes on. Another one takes its name."""
    url = cluster.url("k")
    asyncio.run(leave_stale_record(url))
    with source_at(0, url, fill=9) as source, DiscoveryClient(url) as client:
        eventually(lambda: lives(client.resolve("p", WAIT_S)) == [source.record.incarnation])
        with target_with(url) as (target, pages):
            assert carry(source, target, "room") == Done(b"token")
            assert (pages[[3, 1]] == 9).all()
        asyncio.run(renew_stale_record(url))
        assert lives(client.resolve("p", WAIT_S)) == [source.record.incarnation]


STALE = RankRecord(
    instance="p",
    rank=0,
    incarnation=5,
    fingerprint="m",
    layout=LAYOUT,
    transport="shm",
    control="tcp://127.0.0.1:1",
)


async def leave_stale_record(url: str) -> None:
    discovery = EtcdDiscovery(url)
    await discovery.register(STALE, 60.0)
    await discovery.close()


async def renew_stale_record(url: str) -> None:
    """The dead process turns out to be alive. It does not get its name back."""
    discovery = EtcdDiscovery(url)
    assert (await refused(discovery.renew(STALE, 60.0))).fault is DiscoveryFault.REPLACED
    await discovery.close()
