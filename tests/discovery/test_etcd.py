"""Discovery on real etcd clusters: the conformance suite, lost members, login, TLS."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from urllib.error import HTTPError

import pytest
from discovery.etcd_cluster import EtcdCluster
from msgspec.structs import replace
from namespaces import run_apart

from kvferry.discovery.address import parse_etcd_url
from kvferry.discovery.base import Discovery
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.etcd import EtcdDiscovery
from kvferry.discovery.records import DiscoveryError, InstanceView
from kvferry.errors import InputError
from kvferry.testing.discovery import (
    ENOUGH_S,
    LEASE_S,
    NAME,
    RECORDS,
    DiscoverySuite,
    Talk,
    found,
    lives,
    refused,
    register,
)

TESTS = Path(__file__).parent.parent
PREFIXES = (f"test-{number}" for number in count())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


class TestEtcd(DiscoverySuite):
    @pytest.fixture(autouse=True)
    def _prefix(self, cluster: EtcdCluster) -> None:
        self.cluster = cluster
        self.prefix = next(PREFIXES)

    def make(self) -> Discovery:
        return EtcdDiscovery(self.cluster.url(self.prefix))

    def test_a_key_of_another_program_is_skipped(self, caplog: pytest.LogCaptureFixture) -> None:
        key = f"{self.prefix}/instances/{NAME}/ranks/9".encode()
        put = {"key": base64.b64encode(key).decode(), "value": "e30="}
        self.cluster.ask(self.cluster.members[0], "kv/put", put)

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            assert lives(await found(two)) == [100, 101]

        with caplog.at_level(logging.WARNING):
            self.run(talk)
        assert f"{self.prefix}/instances/{NAME}/ranks/9" in caplog.text

    def test_two_prefixes_do_not_meet(self) -> None:
        other = EtcdDiscovery(self.cluster.url(next(PREFIXES)))

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            assert (await two.list()).instances == ()

        asyncio.run(both(self.make(), other, talk))

    def test_a_renewal_without_a_lease_of_its_own_finds_it(self) -> None:
        """A new client of a process that goes on keeps the registration."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            await two.renew(RECORDS[0], LEASE_S)
            await two.withdraw(RECORDS[0])
            assert "not registered" in str(await refused(one.withdraw(RECORDS[0])))

        self.run(talk)

    def test_a_list_follows_what_comes_and_goes(self) -> None:
        """The second list and later ones come from a mirror that a watch keeps up to date."""

        async def talk(one: Discovery, two: Discovery) -> None:
            assert (await two.list()).instances == ()
            await register(one)
            (line,) = (await two.list()).instances
            assert (line.complete, line.registered) == (True, (0, 1))
            assert line.version == (await found(two)).version
            assert await two.list() is await two.list()
            await one.withdraw(RECORDS[1])
            (line,) = (await two.list()).instances
            assert (line.complete, line.registered, line.version) == (False, (0,), "")
            await one.withdraw(RECORDS[0])
            assert (await two.list()).instances == ()

        self.run(talk)


async def both(one: Discovery, two: Discovery, talk: Talk) -> None:
    try:
        await talk(one, two)
    finally:
        await one.close()
        await two.close()


class Watcher:
    """Views of an instance as a client hears them."""

    def __init__(self, client: DiscoveryClient, prefix: str) -> None:
        self.prefix = prefix
        self.views: list[InstanceView | None] = []
        self._client = client
        self._waiting: list[tuple[list[int | None], Future[None]]] = []
        client.watch(NAME, self._hear)

    def _hear(self, view: InstanceView | None) -> None:
        self.views.append(view)
        for wanted, reached in self._waiting:
            if lives(view) == wanted and not reached.done():
                reached.set_result(None)

    def wait_for(self, *incarnations: int) -> None:
        reached: Future[None] = Future()
        self._waiting.append((list(incarnations), reached))
        if self.views and lives(self.views[-1]) == list(incarnations):
            return
        reached.result(ENOUGH_S)


@pytest.fixture
def watched(cluster: EtcdCluster) -> Iterator[tuple[DiscoveryClient, Watcher]]:
    """A registered instance, and another client that follows it."""
    prefix = next(PREFIXES)
    url = cluster.url(prefix)
    with DiscoveryClient(url) as owner, DiscoveryClient(url) as follower:
        watcher = Watcher(follower, prefix)
        for record in RECORDS:
            owner.register(record, 10.0).result(ENOUGH_S)
        watcher.wait_for(100, 101)
        yield owner, watcher
        cluster.start()


def test_a_killed_leader_loses_nothing(
    cluster: EtcdCluster, watched: tuple[DiscoveryClient, Watcher]
) -> None:
    owner, watcher = watched
    cluster.leader().kill()
    owner.register(replace(RECORDS[1], incarnation=7), 10.0).result(ENOUGH_S)
    watcher.wait_for(100, 7)
    assert None not in watcher.views


def test_a_dead_rank_leaves_after_its_lease_though_the_leader_is_killed(
    cluster: EtcdCluster, watched: tuple[DiscoveryClient, Watcher]
) -> None:
    """A process takes a rank's place and dies without leaving. Its lease ends at the new leader."""
    _, watcher = watched
    asyncio.run(register_and_die(cluster.url(watcher.prefix)))
    watcher.wait_for(100, 5)
    cluster.leader().kill()
    watcher.wait_for()
    # The owner registers again once the rank is free.
    watcher.wait_for(100, 101)
    assert list(map(lives, watcher.views[-3:])) == [[100, 5], [], [100, 101]]


SHORT_S = 2.0


async def register_and_die(url: str) -> None:
    discovery = EtcdDiscovery(url)
    await discovery.register(replace(RECORDS[1], incarnation=5), SHORT_S)
    await discovery.close()


def test_a_killed_member_loses_nothing(
    cluster: EtcdCluster, watched: tuple[DiscoveryClient, Watcher]
) -> None:
    owner, watcher = watched
    leader = cluster.leader()
    next(member for member in cluster.members if member is not leader).kill()
    owner.register(replace(RECORDS[1], incarnation=8), 10.0).result(ENOUGH_S)
    watcher.wait_for(100, 8)
    assert None not in watcher.views


def test_a_list_survives_a_killed_leader(
    cluster: EtcdCluster, watched: tuple[DiscoveryClient, Watcher]
) -> None:
    owner, _ = watched
    assert len(owner.instances().result(ENOUGH_S).instances) == 1
    cluster.leader().kill()
    owner.register(replace(RECORDS[1], instance="another"), 10.0).result(ENOUGH_S)
    names: list[str] = []
    while len(names) < 2:
        # The client of a list that fails asks again, as the router does each second.
        with suppress(DiscoveryError):
            names = [one.name for one in owner.instances().result(ENOUGH_S).instances]
    assert names == ["another", NAME]


def test_a_cluster_that_restarts_knows_its_ranks(
    cluster: EtcdCluster, watched: tuple[DiscoveryClient, Watcher]
) -> None:
    owner, watcher = watched
    for member in cluster.members:
        member.kill()
    cluster.start()
    owner.register(replace(RECORDS[0], incarnation=9), 10.0).result(ENOUGH_S)
    watcher.wait_for(9, 101)
    assert None not in watcher.views


# ---------------------------------------------------------------- login and TLS


def test_user_and_password_are_used(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 1) as cluster:
        member = cluster.members[0]
        cluster.ask(member, "auth/user/add", {"name": "root", "password": "s3:cret"})
        cluster.ask(member, "auth/role/add", {"name": "root"})
        cluster.ask(member, "auth/user/grant", {"user": "root", "role": "root"})
        cluster.ask(member, "auth/enable", {})
        with pytest.raises(HTTPError):
            cluster.ask(member, "kv/range", {"key": "AA=="})
        with DiscoveryClient(cluster.url("k", "root:s3%3Acret@")) as client:
            for record in RECORDS:
                client.register(record).result(ENOUGH_S)
            assert lives(client.resolve(NAME, ENOUGH_S)) == [100, 101]

        async def talk(discovery: Discovery) -> None:
            try:
                assert "user and password" in str(await refused(discovery.list()))
            finally:
                await discovery.close()

        asyncio.run(talk(EtcdDiscovery(cluster.url("k", "root:wrong@"))))


def test_tls_is_used_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    words += " -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    made = [*words.split(), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    flags = ["--cert-file", str(cert), "--key-file", str(key)]
    with EtcdCluster(tmp_path, 1, "https", flags) as cluster:
        with DiscoveryClient(cluster.url("k", query=f"?ca={cert}")) as client:
            client.register(RECORDS[0]).result(ENOUGH_S)
            assert [one.name for one in client.instances().result(ENOUGH_S).instances] == [NAME]
        with (
            DiscoveryClient(cluster.url("k")) as stranger,
            pytest.raises(DiscoveryError, match="certificate"),
        ):
            stranger.instances().result(ENOUGH_S)


# ---------------------------------------------------------------- URLs


def test_a_url_names_members_prefix_and_login() -> None:
    address = parse_etcd_url("etcd://me:p%40ss@a:1,b:2/one/two/")
    assert address.members == ("http://a:1", "http://b:2")
    assert (address.prefix, address.user, address.password) == ("one/two", "me", "p@ss")
    assert parse_etcd_url("etcds://a:1").members == ("https://a:1",)
    assert parse_etcd_url("etcd://a:1").prefix == "kvferry"


@pytest.mark.parametrize(
    "url", ["etcd://", "etcd://a", "etcd://a:x/k", "http://a:1", "etcd://a:1,b/k", "etcd://a:1?x=1"]
)
def test_a_url_that_is_wrong_is_one_sentence(url: str) -> None:
    with pytest.raises(InputError, match="is not an etcd URL; give one such as etcd://"):
        parse_etcd_url(url)


def test_tls_files_need_tls() -> None:
    with pytest.raises(InputError, match="write etcds://"):
        parse_etcd_url("etcd://a:1/k?ca=ca.pem")


# ---------------------------------------------------------------- a partition


def test_a_leader_that_is_cut_off_loses_nothing(tmp_path: Path) -> None:
    """The client used the leader. Nobody sees an instance twice, or an end that was none."""
    printed = run_apart("discovery.etcd_partition", str(tmp_path), 200)
    assert json.loads(printed) == [[100, 101], [100, 7], [8, 7]]
