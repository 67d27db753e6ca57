"""The client beside a real service: both restart, stop, die, and find each other again."""

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

from kvferry.discovery.calls import Backoff
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import DiscoveryError, DiscoveryFault, InstanceView
from kvferry.discovery.server import DiscoveryServer
from kvferry.errors import InputError, Misuse
from kvferry.security.keys import ClusterKey

KEY = ClusterKey(bytes(range(32)))
# Long enough not to end by itself on a busy machine, and renewed three times as often.
LEASE_S = 2.0
SHORT_S = 0.5

Connect = Callable[..., DiscoveryClient]


class Seen:
    """What a callback was told."""

    def __init__(self) -> None:
        self.views: list[InstanceView | None] = []

    def __call__(self, view: InstanceView | None) -> None:
        self.views.append(view)

    @property
    def lives(self) -> list[list[int | None]]:
        """The incarnations of each view; none where the instance had ended."""
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
    """Another service at the same address, which knows nobody."""
    server.stop()
    again = DiscoveryServer(port=urlsplit(server.url).port or 0, settle_s=settle_s)
    return again.start()


def renewals(url: str, status: int) -> int:
    """How many the service has answered that way."""
    text = ask(url, "GET", "/metrics").body.decode()
    path = "/v1/instances/{name}/ranks/{rank}/lease"
    line = f'kvferry_discovery_requests_total{{route="PUT {path}",status="{status}"}} '
    return int(float(text.partition(line)[2].partition("\n")[0] or 0))


def test_a_registration_outlives_its_lease(server: DiscoveryServer, connect: Connect) -> None:
    seen = Seen()
    client = connect(server)
    client.watch("p", seen)
    client.register(record(layout=layout(tp=1)), LEASE_S)
    wait_until(lambda: seen.lives == [[1]])
    # Three renewals a lease: the first one is over.
    wait_until(lambda: renewals(server.url, 204) >= 4)
    assert seen.lives == [[1]]


def test_a_rank_that_dies_is_told_when_its_lease_ends(
    server: DiscoveryServer, connect: Connect
) -> None:
    seen = Seen()
    connect(server).watch("p", seen)
    # Registered by somebody who never renews.
    body = registration(record(layout=layout(tp=1)), SHORT_S)
    assert ask(server.url, "PUT", "/v1/instances/p/ranks/0", body).status == 204
    wait_until(lambda: seen.lives == [[1], []])
    assert ask(server.url, "PUT", "/v1/instances/p/ranks/0", body).status == 204
    wait_until(lambda: seen.lives[:3] == [[1], [], [1]])


def test_a_service_that_restarts_is_told_again_and_nobody_notices(
    server: DiscoveryServer, connect: Connect
) -> None:
    seen = Seen()
    connect(server).watch("p", seen)
    for rank in (0, 1):
        connect(server).register(record(rank=rank, incarnation=rank), LEASE_S).result(ENOUGH_S)
    wait_until(lambda: seen.lives == [[0, 1]])
    again = restarted(server)
    try:
        wait_until(lambda: ask(again.url, "GET", "/v1/instances/p").status == 200)
        # What is new reaches the watcher, and nothing came before it.
        connect(again).register(record(rank=1, incarnation=5), LEASE_S)
        wait_until(lambda: len(seen.views) > 1)
        assert seen.lives[:2] == [[0, 1], [0, 5]]
    finally:
        again.stop()


def test_what_died_with_the_service_is_noticed_once_it_is_settled(
    server: DiscoveryServer, connect: Connect
) -> None:
    seen = Seen()
    connect(server).watch("p", seen)
    body = registration(record(layout=layout(tp=1)))
    ask(server.url, "PUT", "/v1/instances/p/ranks/0", body)
    wait_until(lambda: seen.lives == [[1]])
    again = restarted(server, settle_s=1.0)
    try:
        wait_until(lambda: seen.lives == [[1], []])
    finally:
        again.stop()


def test_while_the_service_is_away_what_was_known_stays(
    server: DiscoveryServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client, seen = connect(server), Seen()
    client.register(record(layout=layout(tp=1)), LEASE_S)
    client.watch("p", seen)
    wait_until(lambda: seen.lives == [[1]])
    with caplog.at_level(logging.DEBUG, "kvferry.discovery"):
        server.stop()
        wait_until(lambda: sum("not-registered" in line for line in caplog.messages) >= 4)
    late = Seen()
    client.watch("p", late)
    wait_until(lambda: late.lives == [[1]])
    assert client.resolve("p", ENOUGH_S) == seen.views[0]
    assert seen.lives == [[1]]


def test_who_was_replaced_stays_away_until_the_other_has_left(
    server: DiscoveryServer, connect: Connect
) -> None:
    old, new, seen = connect(server), connect(server), Seen()
    old.register(record(layout=layout(tp=1)), LEASE_S).result(ENOUGH_S)
    new.register(record(incarnation=2, layout=layout(tp=1)), LEASE_S).result(ENOUGH_S)
    connect(server).watch("p", seen)
    wait_until(lambda: renewals(server.url, 409) >= 3)
    assert seen.lives == [[2]]
    new.close()
    wait_until(lambda: seen.lives[-1] == [1])


def test_closing_says_farewell(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    for rank in (0, 1):
        client.register(record(rank=rank), 300.0).result(ENOUGH_S)
    client.close()
    assert ask(server.url, "GET", "/v1/instances").json == {"instances": []}
    client.close()
    for call in (lambda: client.watch("p", Seen()), lambda: client.resolve("p", 1.0)):
        with pytest.raises(Misuse, match="closed"):
            call()


# ---------------------------------------------------------------- watching


def test_after_unwatch_nothing_is_told(server: DiscoveryServer, connect: Connect) -> None:
    client, one, two = connect(server), Seen(), Seen()
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


def test_who_is_eager_hears_first_that_an_instance_is_not_there(
    server: DiscoveryServer, connect: Connect
) -> None:
    client, patient, eager, late, gone = connect(server), Seen(), Seen(), Seen(), Seen()
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


def test_a_callback_that_fails_ends_nothing(
    server: DiscoveryServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client, seen = connect(server), Seen()

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


def test_many_instances_are_followed_at_once(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    seen = {f"p{number}": Seen() for number in range(150)}
    for name, one in seen.items():
        client.watch(name, one)
    for name in seen:
        client.register(record(name, layout=layout(tp=1)))
    wait_until(lambda: all(one.lives == [[1]] for one in seen.values()))


def test_resolving_in_vain_says_why(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    client.register(record(rank=0)).result(ENOUGH_S)
    with pytest.raises(DiscoveryError, match=r"not complete within 1 s: 'p' waits for rank 1"):
        client.resolve("p", 1.0)
    server.stop()
    with pytest.raises(DiscoveryError, match="cannot reach the discovery service"):
        client.resolve("q", 1.0)


# ---------------------------------------------------------------- refusals


def test_the_same_key_on_both_sides(connect: Connect) -> None:
    with DiscoveryServer(key=KEY) as server:
        client = connect(server, KEY)
        client.register(record("a/b c".replace(" ", ":"), layout=layout(tp=1))).result(ENOUGH_S)
        assert client.resolve("a/b:c", ENOUGH_S).ranks[0].incarnation == 1


@pytest.mark.parametrize("key", [None, ClusterKey(bytes(32))])
def test_another_key_is_refused_with_a_sentence(connect: Connect, key: ClusterKey | None) -> None:
    with DiscoveryServer(key=KEY) as server:
        client = connect(server, key)
        with pytest.raises(DiscoveryError, match="cluster key") as error:
            client.register(record()).result(ENOUGH_S)
        assert error.value.fault is DiscoveryFault.UNSIGNED
        with pytest.raises(DiscoveryError, match=r"within 1 s: .*cluster key"):
            client.resolve("p", 1.0)


def test_a_lease_that_can_t_be_is_refused(server: DiscoveryServer, connect: Connect) -> None:
    with pytest.raises(DiscoveryError, match="lease_s"):
        connect(server).register(record(), 1e6).result(ENOUGH_S)


def test_a_registration_waits_for_a_service_that_comes_later(connect: Connect) -> None:
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


def test_closing_with_a_service_that_never_answers_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = DiscoveryClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        future = client.register(record())
        client.watch("p", Seen())
        silent.accept()[0].close()
        begun = time.monotonic()
        client.close()
        assert time.monotonic() - begun < ENOUGH_S / 3
        with pytest.raises(DiscoveryError, match="closed"):
            future.result(0)


@pytest.mark.parametrize("says", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"\x00" * 99])
def test_a_stranger_at_the_address_is_told_apart(says: bytes) -> None:
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
        reason = pytest.raises(DiscoveryError, match=r"can't be used|cannot reach")
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
def test_an_address_that_is_none_is_one_sentence(url: str) -> None:
    with pytest.raises(InputError, match="is no discovery address; give one such as"):
        DiscoveryClient(url)


def test_the_wait_after_errors_grows_to_a_limit_and_is_never_the_same() -> None:
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(30)]
    assert waits[0] <= Backoff.FIRST_S
    assert all(wait <= Backoff.MOST_S for wait in waits)
    assert all(wait >= Backoff.MOST_S / 2 for wait in waits[10:])
    assert len(set(waits[10:])) > 1
    backoff.reset()
    assert backoff.next_s() <= Backoff.FIRST_S


def test_what_happens_is_logged(
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


def test_who_is_registered_can_be_asked(server: DiscoveryServer, connect: Connect) -> None:
    client = connect(server)
    assert client.instances().result(ENOUGH_S).instances == ()
    client.register(record(rank=0)).result(ENOUGH_S)
    (summary,) = connect(server).instances().result(ENOUGH_S).instances
    assert (summary.name, summary.complete, summary.registered) == ("p", False, 1)


def test_asking_where_nobody_answers_says_so() -> None:
    with DiscoveryClient("http://127.0.0.1:1") as client:
        with pytest.raises(DiscoveryError, match="cannot reach"):
            client.instances().result(ENOUGH_S)
        asked = client.instances()
    assert isinstance(asked.exception(ENOUGH_S), DiscoveryError)


class Foreign(asyncio.DefaultEventLoopPolicy):
    """The policy of a process whose loops are not ours to use, as uvloop's are."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        raise AssertionError("the embedding process's loop was taken")


def test_the_event_loop_of_who_embeds_it_is_left_alone() -> None:
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(Foreign())
    try:
        with DiscoveryServer() as server, DiscoveryClient(server.url) as client:
            assert client.instances().result(ENOUGH_S).instances == ()
    finally:
        asyncio.set_event_loop_policy(before)
