"""The client with a real service: restarts, stops and deaths of either side."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from urllib.parse import urlsplit

import pytest
from discovery.parts import ENOUGH_S, ask, layout, record, registration, wait_until

from kvferry.discovery.backoff import Backoff
from kvferry.discovery.base import Discovery
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryFault,
    InstanceView,
    RankRecord,
    Summaries,
)
from kvferry.discovery.static import StaticDiscovery, StaticInstance
from kvferry.errors import InputError, Misuse
from kvferry.security.keys import ClusterKey
from kvferry.testing.discovery import LAYOUT, NAME, RECORDS

KEY = ClusterKey(bytes(range(32)))
# Long enough not to end by itself on a busy machine, and renewed three times as often.
LEASE_S = 2.0
SHORT_S = 0.5

Connect = Callable[..., DiscoveryClient]


class RecordingCallback:
    """A callback that records its calls."""

    def __init__(self) -> None:
        self.views: list[InstanceView | None] = []

    def __call__(self, view: InstanceView | None) -> None:
        self.views.append(view)

    @property
    def lives(self) -> list[list[int | None]]:
        """The incarnations of each view; empty for None."""
        return [[rank.incarnation for rank in view.ranks] if view else [] for view in self.views]


@pytest.fixture
def server() -> Iterator[DiscoveryServer]:
    with DiscoveryServer() as server:
        yield server


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[DiscoveryClient] = []

    def make(server: DiscoveryServer, key: ClusterKey | None = None) -> DiscoveryClient:
        made.append(DiscoveryClient(server.url, key))
        return made[-1]

    yield make
    for client in made:
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < ENOUGH_S / 3


def restarted(server: DiscoveryServer, settle_s: float = 30.0) -> DiscoveryServer:
    """Restart the service, empty, at the same address."""
    server.stop()
    again = DiscoveryServer(port=urlsplit(server.url).port or 0, settle_s=settle_s)
    return again.start()


def renewals(url: str, status: int) -> int:
    """Number of renewals that the service has answered with ``status``."""
    text = ask(url, "GET", "/metrics").body.decode()
    path = "/v1/instances/{name}/ranks/{rank}/lease"
    line = f'kvferry_discovery_requests_total{{route="PUT {path}",status="{status}"}} '
    return int(float(text.partition(line)[2].partition("\n")[0] or 0))


def test_a_registration_outlives_its_lease(server: DiscoveryServer, connect: Connect) -> None:
    seen = RecordingCallback()
    client = connect(server)
    client.watch("p", seen)
    client.register(record(layout=layout(tp=1)), LEASE_S)
    wait_until(lambda: seen.lives == [[1]])
    # Three renewals a lease: the first one is over.
    wait_until(lambda: renewals(server.url, 204) >= 4)
    assert seen.lives == [[1]]


def test_watchers_are_told_when_a_lease_ends(server: DiscoveryServer, connect: Connect) -> None:
    seen = RecordingCallback()
    connect(server).watch("p", seen)
    # Registered without renewals.
    body = registration(record(layout=layout(tp=1)), SHORT_S)
    assert ask(server.url, "PUT", "/v1/instances/p/ranks/0", body).status == 204
    wait_until(lambda: seen.lives == [[1], []])
    assert ask(server.url, "PUT", "/v1/instances/p/ranks/0", body).status == 204
    wait_until(lambda: seen.lives[:3] == [[1], [], [1]])


def test_ranks_register_again_after_a_restart_unnoticed_by_watchers(
    server: DiscoveryServer, connect: Connect
) -> None:
    seen = RecordingCallback()
    connect(server).watch("p", seen)
    for rank in (0, 1):
        connect(server).register(record(rank=rank, incarnation=rank), LEASE_S).result(ENOUGH_S)
    wait_until(lambda: seen.lives == [[0, 1]])
    again = restarted(server)
    try:
        wait_until(lambda: ask(again.url, "GET", "/v1/instances/p").status == 200)
        # The watcher gets the change, and nothing before it.
        connect(again).register(record(rank=1, incarnation=5), LEASE_S)
        wait_until(lambda: len(seen.views) > 1)
        assert seen.lives[:2] == [[0, 1], [0, 5]]
    finally:
        again.stop()


def test_an_instance_lost_in_a_restart_ends_once_the_service_settles(
    server: DiscoveryServer, connect: Connect
) -> None:
    seen = RecordingCallback()
    connect(server).watch("p", seen)
    body = registration(record(layout=layout(tp=1)))
    ask(server.url, "PUT", "/v1/instances/p/ranks/0", body)
    wait_until(lambda: seen.lives == [[1]])
    again = restarted(server, settle_s=1.0)
    try:
        wait_until(lambda: seen.lives == [[1], []])
    finally:
        again.stop()


def test_views_stay_while_the_service_is_away(
    server: DiscoveryServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client, seen = connect(server), RecordingCallback()
    client.register(record(layout=layout(tp=1)), LEASE_S)
    client.watch("p", seen)
    wait_until(lambda: seen.lives == [[1]])
    with caplog.at_level(logging.DEBUG, "kvferry.discovery"):
        server.stop()
        wait_until(lambda: sum("not-registered" in line for line in caplog.messages) >= 4)
    late = RecordingCallback()
    client.watch("p", late)
    wait_until(lambda: late.lives == [[1]])
    assert client.resolve("p", ENOUGH_S) == seen.views[0]
    assert seen.lives == [[1]]


def test_a_replaced_rank_registers_after_the_other_has_left(
    server: DiscoveryServer, connect: Connect
) -> None:
    old, new, seen = connect(server), connect(server), RecordingCallback()
    old.register(record(layout=layout(tp=1)), LEASE_S).result(ENOUGH_S)
    new.register(record(incarnation=2, layout=layout(tp=1)), LEASE_S).result(ENOUGH_S)
    connect(server).watch("p", seen)
    wait_until(lambda: renewals(server.url, 409) >= 3)
    assert seen.lives == [[2]]
    new.close()
    wait_until(lambda: seen.lives[-1] == [1])


def test_close_withdraws_the_ranks(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    for rank in (0, 1):
        client.register(record(rank=rank), 300.0).result(ENOUGH_S)
    client.close()
    assert ask(server.url, "GET", "/v1/instances").json["instances"] == []
    client.close()
    for call in (lambda: client.watch("p", RecordingCallback()), lambda: client.resolve("p", 1.0)):
        with pytest.raises(Misuse, match="closed"):
            call()


# ---------------------------------------------------------------- watching


def test_unwatch_stops_the_calls(server: DiscoveryServer, connect: Connect) -> None:
    client, one, two = connect(server), RecordingCallback(), RecordingCallback()
    client.watch("p", one)
    client.watch("p", two)
    client.register(record(layout=layout(tp=1)))
    wait_until(lambda: one.lives == two.lives == [[1]])
    client.unwatch("p", one)
    client.unwatch("p", one)
    client.unwatch("q", one)
    connect(server).register(record(incarnation=2, layout=layout(tp=1)))
    wait_until(lambda: two.lives == [[1], [2]])
    assert one.lives == [[1]]


def test_an_eager_watch_reports_a_missing_instance(
    server: DiscoveryServer, connect: Connect
) -> None:
    client, patient, eager, late, gone = (
        connect(server),
        RecordingCallback(),
        RecordingCallback(),
        RecordingCallback(),
        RecordingCallback(),
    )
    client.watch("p", patient)
    client.watch("p", gone, eager=True)
    client.unwatch("p", gone)
    client.watch("p", eager, eager=True)
    wait_until(lambda: eager.views == [None])
    client.watch("p", late, eager=True)
    wait_until(lambda: late.views == [None])
    assert client.problem("p").startswith("nobody has registered as 'p'")
    client.register(record(layout=layout(tp=1)))
    wait_until(lambda: eager.lives == late.lives == [[], [1]])
    assert patient.lives == [[1]]
    client.watch("p", gone, eager=True)
    wait_until(lambda: gone.lives[-1:] == [[1]])


def test_an_exception_in_a_callback_is_survived(
    server: DiscoveryServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client, seen = connect(server), RecordingCallback()

    def broken(view: InstanceView | None) -> None:
        raise RuntimeError("a bug of the caller's")

    client.watch("p", broken)
    client.watch("p", seen)
    client.register(record(layout=layout(tp=1)))
    wait_until(lambda: seen.lives == [[1]])
    assert any("callback-failed instance=p" in line for line in caplog.messages)


def test_a_callback_may_close_but_not_wait(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    raised: Future[Exception] = Future()

    def act(view: InstanceView | None) -> None:
        try:
            client.resolve("p", 1.0)
        except Misuse as error:
            client.close()
            raised.set_result(error)

    client.watch("p", act)
    client.register(record(layout=layout(tp=1)))
    assert "use watch" in str(raised.result(ENOUGH_S))


def test_many_instances_can_be_watched(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    seen = {f"p{number}": RecordingCallback() for number in range(150)}
    for name, one in seen.items():
        client.watch(name, one)
    for name in seen:
        client.register(record(name, layout=layout(tp=1)))
    wait_until(lambda: all(one.lives == [[1]] for one in seen.values()))


def test_a_failed_resolve_says_why(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    client.register(record(rank=0)).result(ENOUGH_S)
    with pytest.raises(DiscoveryError, match=r"not complete within 1 s: 'p' waits for rank 1"):
        client.resolve("p", 1.0)
    server.stop()
    with pytest.raises(DiscoveryError, match="cannot reach the discovery service"):
        client.resolve("q", 1.0)


# ---------------------------------------------------------------- refusals


def test_client_and_service_with_the_same_key(connect: Connect) -> None:
    with DiscoveryServer(key=KEY) as server:
        client = connect(server, KEY)
        client.register(record("a/b c".replace(" ", ":"), layout=layout(tp=1))).result(ENOUGH_S)
        assert client.resolve("a/b:c", ENOUGH_S).ranks[0].incarnation == 1


@pytest.mark.parametrize("key", [None, ClusterKey(bytes(32))])
def test_another_key_is_refused(connect: Connect, key: ClusterKey | None) -> None:
    with DiscoveryServer(key=KEY) as server:
        client = connect(server, key)
        with pytest.raises(DiscoveryError, match="cluster key") as error:
            client.register(record()).result(ENOUGH_S)
        assert error.value.fault is DiscoveryFault.UNSIGNED
        with pytest.raises(DiscoveryError, match=r"within 1 s: .*cluster key"):
            client.resolve("p", 1.0)


def test_an_invalid_lease_is_refused(server: DiscoveryServer, connect: Connect) -> None:
    with pytest.raises(DiscoveryError, match="lease_s"):
        connect(server).register(record(), 1e6).result(ENOUGH_S)


def test_a_registration_waits_for_the_service_to_start(connect: Connect) -> None:
    first = DiscoveryServer().start()
    first.stop()
    client = connect(first)
    future = client.register(record(layout=layout(tp=1)), LEASE_S)
    with pytest.raises(TimeoutError):
        future.result(0.3)
    again = restarted(first)
    try:
        future.result(ENOUGH_S)
        assert client.resolve("p", ENOUGH_S).name == "p"
    finally:
        again.stop()


def test_close_is_bounded_if_the_service_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = DiscoveryClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        future = client.register(record())
        client.watch("p", RecordingCallback())
        silent.accept()[0].close()
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < ENOUGH_S / 3
        with pytest.raises(DiscoveryError, match="closed"):
            future.result(0)


@pytest.mark.parametrize("says", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"\x00" * 99])
def test_another_server_at_the_url_is_reported(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            while True:
                try:
                    asker, _ = stranger.accept()
                except OSError:
                    return
                with asker:
                    asker.recv(4096)
                    asker.sendall(says)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{stranger.getsockname()[1]}"
        reason = pytest.raises(DiscoveryError, match=r"cannot read|cannot reach")
        with DiscoveryClient(address) as client, reason:
            client.resolve("p", 0.5)
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join(ENOUGH_S)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7077",
        "https://a:1",
        "http://a",
        "http://a:99999",
        "http://a:1/x",
        "http://",
        "http://user@a:1",
        "http://a:1?x=1",
        "http://[::1:7",
        "http://:7077",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="is not a discovery URL; give one such as"):
        DiscoveryClient(url)


def test_backoff_grows_to_a_limit_with_jitter() -> None:
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(30)]
    assert waits[0] <= Backoff.FIRST_S
    assert all(wait <= Backoff.MOST_S for wait in waits)
    assert all(wait >= Backoff.MOST_S / 2 for wait in waits[10:])
    assert len(set(waits[10:])) > 1
    backoff.reset()
    assert backoff.next_s() <= Backoff.FIRST_S


def test_events_are_logged(
    server: DiscoveryServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvferry.discovery"):
        client = connect(server)
        client.register(record(layout=layout(tp=1)), LEASE_S).result(ENOUGH_S)
        client.resolve("p", ENOUGH_S)
        server.stop()
        wait_until(lambda: any("not-registered peer=p/0" in line for line in caplog.messages))
    assert f"registered peer=p/0 url={server.url}" in caplog.messages
    assert "instance name=p complete=True" in caplog.messages


def test_instances_lists_registered_ranks(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    assert client.instances().result(ENOUGH_S).instances == ()
    client.register(record(rank=0)).result(ENOUGH_S)
    (summary,) = connect(server).instances().result(ENOUGH_S).instances
    assert (summary.name, summary.complete, summary.registered) == ("p", False, (0,))


def test_instances_fails_if_the_service_is_unreachable() -> None:
    with DiscoveryClient("http://127.0.0.1:1") as client:
        with pytest.raises(DiscoveryError, match="cannot reach"):
            client.instances().result(ENOUGH_S)
        asked = client.instances()
    assert isinstance(asked.exception(ENOUGH_S), DiscoveryError)


class Foreign(asyncio.DefaultEventLoopPolicy):
    """A policy of the embedding process, such as uvloop's."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        raise AssertionError("the embedding process's loop was taken")


def test_the_embedding_event_loop_policy_is_ignored() -> None:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Foreign())
    try:
        with DiscoveryServer() as server, DiscoveryClient(server.url) as client:
            assert client.instances().result(ENOUGH_S).instances == ()
    finally:
        asyncio.set_event_loop_policy(before)


# ---------------------------------------------------------------- a backend with bugs


ADDRESSES = ("127.0.0.1:5000", "tcp://127.0.0.1:5001")
LISTED = StaticInstance(name=NAME, ranks=ADDRESSES, layout=LAYOUT)


class FailingOnce(Discovery):
    """Raises an unexpected exception on the first call of each method."""

    def __init__(self) -> None:
        self._inner = StaticDiscovery([LISTED])
        self._calls: set[str] = set()

    def _fail_first(self, call: str) -> None:
        if call not in self._calls:
            self._calls.add(call)
            raise KeyError(call)

    async def register(self, record: RankRecord, lease_s: float) -> None:
        self._fail_first("register")

    async def renew(self, record: RankRecord, lease_s: float) -> float:
        self._fail_first("renew")
        return lease_s / 3

    async def withdraw(self, record: RankRecord) -> None:
        self._fail_first("withdraw")

    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        self._fail_first("watch")
        return await self._inner.watch(name, version, wait_s)

    async def list(self) -> Summaries:
        self._fail_first("list")
        return await self._inner.list()


def test_unexpected_exceptions_of_a_backend_are_survived() -> None:
    with DiscoveryClient(FailingOnce()) as client:
        with pytest.raises(DiscoveryError, match=r"discovery backend failed \(KeyError\('list'"):
            client.instances().result(ENOUGH_S)
        assert [each.name for each in client.instances().result(ENOUGH_S).instances] == [NAME]
        client.register(RECORDS[0]).result(ENOUGH_S)
        assert client.resolve(NAME, ENOUGH_S).name == NAME
