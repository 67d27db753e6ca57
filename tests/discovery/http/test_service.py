"""The service over real sockets, with plain HTTP requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import pytest
from discovery.parts import (
    ENOUGH_S,
    Answer,
    ask,
    layout,
    life_of,
    record,
    registration,
    signed,
    wait_until,
)

from kvferry.discovery.http.gate import MAX_BODY_BYTES
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.discovery.records import InstanceView
from kvferry.errors import InputError
from kvferry.security.keys import ClusterKey
from kvferry.security.signing import sign

KEY = ClusterKey(bytes(range(32)))
RANK = "/v1/instances/p/ranks/0"


@pytest.fixture
def url() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


@pytest.fixture
def keyed() -> Iterator[str]:
    with DiscoveryServer(key=KEY) as server:
        yield server.url


def put(url: str, rank: int, incarnation: int = 1, lease_s: float = 10.0) -> Answer:
    body = registration(record(rank=rank, incarnation=incarnation), lease_s)
    return ask(url, "PUT", f"/v1/instances/p/ranks/{rank}", body)


def complete(url: str, lease_s: float = 10.0) -> InstanceView:
    assert put(url, 0, 1, lease_s).status == 204
    assert put(url, 1, 2, lease_s).status == 204
    answer = ask(url, "GET", "/v1/instances/p")
    assert answer.status == 200
    return msgspec.json.decode(answer.body, type=InstanceView)


class PendingRequest(threading.Thread):
    """A request that waits, in a thread."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(daemon=True)
        self.url, self.path = url, path
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        self.answer = ask(self.url, "GET", self.path)

    def until_it_waits(self, num_waiting: int = 1) -> PendingRequest:
        """Wait until the service has ``num_waiting`` waiting requests."""
        waiting = f"kvferry_discovery_waiting_requests {num_waiting}.0".encode()
        wait_until(lambda: waiting in ask(self.url, "GET", "/metrics").body)
        return self

    def result(self) -> Answer:
        self.join(ENOUGH_S)
        assert self.answer is not None
        return self.answer


# ---------------------------------------------------------------- registering and finding


def test_a_complete_instance_is_found(url: str) -> None:
    assert put(url, 0).status == 204
    answer = ask(url, "GET", "/v1/instances/p")
    assert (answer.status, answer.code) == (404, "incomplete")
    assert answer.message == "'p' waits for rank 1 of 2"
    assert put(url, 1, 2).status == 204
    view = msgspec.json.decode(ask(url, "GET", "/v1/instances/p").body, type=InstanceView)
    assert view.layout == layout(tp=2)
    assert [rank.incarnation for rank in view.ranks] == [1, 2]
    assert [rank.control for rank in view.ranks] == ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"]


def test_the_list_shows_every_instance(url: str) -> None:
    assert ask(url, "GET", "/v1/instances").json["instances"] == []
    put(url, 0)
    (line,) = ask(url, "GET", "/v1/instances").json["instances"]
    assert line["name"] == "p"
    assert (line["complete"], line["registered"], line["num_ranks"]) == (False, [0], 2)
    assert line["note"] == "'p' waits for rank 1 of 2"
    put(url, 1)
    (line,) = ask(url, "GET", "/v1/instances").json["instances"]
    assert line["complete"] is True
    assert line["layout"] == "TP2, page 16, NHD"


def test_a_list_is_sent_only_if_it_has_changed(url: str) -> None:
    put(url, 0)
    version = ask(url, "GET", "/v1/instances").json["version"]
    assert ask(url, "GET", f"/v1/instances?version={version}").status == 304
    put(url, 1)
    assert ask(url, "GET", f"/v1/instances?version={version}").json["version"] != version


def test_withdrawing_needs_the_incarnation(url: str) -> None:
    complete(url)
    assert ask(url, "DELETE", f"{RANK}?incarnation=5").code == "replaced"
    assert ask(url, "DELETE", RANK).code == "malformed"
    assert ask(url, "DELETE", f"{RANK}?incarnation=1").status == 204
    assert ask(url, "DELETE", f"{RANK}?incarnation=1").code == "no-lease"
    assert ask(url, "GET", "/v1/instances/p").code == "incomplete"


def test_renewing_needs_a_lease_of_that_incarnation(url: str) -> None:
    renewal = b'{"incarnation": 1, "lease_s": 5}'
    assert ask(url, "PUT", f"{RANK}/lease", renewal).code == "no-lease"
    put(url, 0)
    assert ask(url, "PUT", f"{RANK}/lease", renewal).status == 204
    put(url, 0, 9)
    answer = ask(url, "PUT", f"{RANK}/lease", renewal)
    assert (answer.status, answer.code) == (409, "replaced")


def test_a_rank_that_dies_disappears_when_its_lease_ends(url: str) -> None:
    complete(url, lease_s=0.5)
    wait_until(lambda: ask(url, "GET", "/v1/instances/p").status == 404)
    wait_until(lambda: ask(url, "GET", "/v1/instances").json["instances"] == [])
    assert b"kvferry_discovery_expired_leases_total 2.0" in ask(url, "GET", "/metrics").body
    assert complete(url).ranks[1].incarnation == 2


def test_names_may_have_slashes_and_ports(url: str) -> None:
    name = "http://10.0.0.1:8000/replica-1"
    path = "/v1/instances/http%3A%2F%2F10.0.0.1%3A8000%2Freplica-1"
    body = registration(record(name, layout=layout(tp=1)))
    assert ask(url, "PUT", f"{path}/ranks/0", body).status == 204
    assert ask(url, "GET", path).json["name"] == name


# ---------------------------------------------------------------- waiting


def test_a_waiting_request_is_answered_at_once(url: str) -> None:
    asking = PendingRequest(url, "/v1/instances/p?wait_s=30").until_it_waits()
    put(url, 0)
    begun = time.monotonic()
    put(url, 1)
    assert asking.result().status == 200
    assert time.monotonic() - begun < ENOUGH_S / 3


def test_a_request_with_the_current_version_waits_for_a_change(url: str) -> None:
    version = complete(url).version
    path = f"/v1/instances/p?version={version}&wait_s="
    assert ask(url, "GET", f"{path}0.2").status == 304
    asking = PendingRequest(url, f"{path}30").until_it_waits()
    put(url, 0, 7)
    assert asking.result().json["ranks"][0]["incarnation"] == 7


def test_a_request_with_the_current_version_is_told_of_the_end(url: str) -> None:
    version = complete(url).version
    asking = PendingRequest(url, f"/v1/instances/p?version={version}&wait_s=30").until_it_waits()
    ask(url, "DELETE", f"{RANK}?incarnation=1")
    assert asking.result().code == "incomplete"
    assert ask(url, "GET", f"/v1/instances/p?version={version}&wait_s=30").code == "incomplete"


def test_a_request_for_an_unknown_instance_waits(url: str) -> None:
    begun = time.monotonic()
    answer = ask(url, "GET", "/v1/instances/q?wait_s=0.3")
    assert (answer.code, time.monotonic() - begun > 0.25) == ("incomplete", True)
    assert "nobody has registered as 'q'" in answer.message


def test_a_new_service_does_not_end_older_views_until_it_settles() -> None:
    with DiscoveryServer(settle_s=2.0) as server:
        path = "/v1/instances/p?version=0a0b0c0d.5&wait_s=0.1"
        answer = ask(server.url, "GET", path)
        assert (answer.status, answer.code) == (503, "settling")
        wait_until(lambda: ask(server.url, "GET", path).code == "incomplete")
        complete(server.url)
        assert ask(server.url, "GET", path).status == 200


def test_waiting_requests_are_answered_at_shutdown() -> None:
    server = DiscoveryServer().start()
    asking = [PendingRequest(server.url, "/v1/instances/p?wait_s=50") for _ in range(5)]
    asking[-1].until_it_waits(5)
    begun = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - begun < ENOUGH_S / 3
    assert {one.result().code for one in asking} == {"stopping"}


def test_health_requests_are_counted(url: str) -> None:
    assert ask(url, "GET", "/healthz").json == {"status": "ok"}
    assert b'route="GET /healthz"' in ask(url, "GET", "/metrics").body


# ---------------------------------------------------------------- malformed input


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"lease_s": 5}',
        registration(record()).replace(b'"lease_s":10.0', b'"lease_s":0.01'),
        registration(record()).replace(b'"lease_s":10.0', b'"lease_s":1e9'),
        registration(record()).replace(b'"rank":0', b'"rank":5'),
        registration(record()).replace(b'"tp":2', b'"tp":3'),
        registration(record()).replace(b'"tp":2', b'"tp":-1'),
        registration(record()).replace(b'"num_layers":4', b'"num_layers":0'),
        registration(record()).replace(b'"instance":"p"', b'"instance":"q"'),
        registration(record(rank=1)),
    ],
)
def test_a_malformed_body_is_refused(url: str, body: bytes) -> None:
    answer = ask(url, "PUT", RANK, body)
    assert (answer.status, answer.code) == (400, "malformed")
    assert put(url, 0).status == 204


def test_an_oversized_body_is_refused(url: str) -> None:
    answer = ask(url, "PUT", RANK, b"x" * (MAX_BODY_BYTES + 1))
    assert (answer.status, answer.code) == (413, "oversized")
    assert put(url, 0).status == 204


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not-found"),
        ("GET", "/v2/instances", 404, "not-found"),
        ("GET", "/v1/instances/%2e%2e/x", 404, "not-found"),
        ("POST", "/v1/instances", 405, "method"),
        ("PATCH", RANK, 405, "method"),
        ("OPTIONS", "/healthz", 405, "method"),
        ("DELETE", "/v1/instances/p/ranks/x?incarnation=1", 400, "malformed"),
        ("DELETE", "/v1/instances/p/ranks/-1?incarnation=1", 400, "malformed"),
        ("DELETE", f"{RANK}?incarnation=99999999999999999999", 400, "malformed"),
        ("DELETE", f"{RANK}?incarnation=9999999999999999999", 400, "malformed"),
        ("GET", "/v1/instances/p?wait_s=-1", 400, "malformed"),
        ("GET", "/v1/instances/p?wait_s=nan", 400, "malformed"),
        ("GET", "/v1/instances/p?wait_s=61", 400, "malformed"),
        ("GET", "/v1/instances/p?wait_s=", 400, "malformed"),
        ("GET", "/v1/instances/%00%0a%ff", 404, "incomplete"),
        ("GET", "/v1/instances/%00?version=%00%ff", 503, "settling"),
    ],
)
def test_a_malformed_request_is_refused(
    url: str, method: str, path: str, status: int, code: str
) -> None:
    answer = ask(url, method, path)
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize("junk", [b"\x00\xff" * 50, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b""])
def test_foreign_bytes_do_not_disturb_the_service(url: str, junk: bytes) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), ENOUGH_S) as stranger:
        stranger.sendall(junk)
        stranger.shutdown(socket.SHUT_WR)
        answer = b""
        while part := stranger.recv(4096):
            answer += part
    assert b"Traceback" not in answer
    assert put(url, 0).status == 204


# ---------------------------------------------------------------- keys


def test_with_a_key_every_request_is_signed(keyed: str) -> None:
    body = registration(record())
    for key in (None, ClusterKey.new()):
        for method, path, sent in (
            ("PUT", RANK, body),
            ("PUT", f"{RANK}/lease", b"{}"),
            ("DELETE", f"{RANK}?incarnation=1", b""),
            ("GET", "/v1/instances", b""),
            ("GET", "/v1/instances/p", b""),
            ("GET", "/nothing", b""),
        ):
            answer = ask(keyed, method, path, sent, key)
            assert (answer.status, answer.code) == (401, "unsigned"), path
    assert ask(keyed, "PUT", RANK, body, KEY).status == 204
    (line,) = ask(keyed, "GET", "/v1/instances", b"", KEY).json["instances"]
    assert line["registered"] == [0]


def test_a_request_cannot_be_replayed_or_changed(keyed: str) -> None:
    body = registration(record())
    header = {"Authorization": signed(keyed, KEY, "PUT", RANK, body)}
    assert ask(keyed, "PUT", RANK, body + b" ", headers=header).code == "unsigned"
    assert ask(keyed, "DELETE", RANK, body, headers=header).code == "unsigned"
    assert ask(keyed, "PUT", RANK, body, headers=header).status == 204
    answer = ask(keyed, "PUT", RANK, body, headers=header)
    assert (answer.status, answer.code) == (401, "replayed")


def test_a_request_cannot_be_replayed_after_a_restart() -> None:
    """The new start has forgotten the nonces, and accepts no signature for the old one."""
    body = registration(record())
    with DiscoveryServer(key=KEY) as server:
        port = urlsplit(server.url).port
        header = {"Authorization": signed(server.url, KEY, "PUT", RANK, body)}
        assert ask(server.url, "PUT", RANK, body, headers=header).status == 204
    assert port is not None
    with DiscoveryServer(port=port, key=KEY) as again:
        answer = ask(again.url, "PUT", RANK, body, headers=header)
        assert (answer.status, answer.code) == (401, "other-life")
        assert ask(again.url, "GET", "/v1/instances", b"", KEY).json["instances"] == []


def test_a_request_is_valid_for_one_service(keyed: str) -> None:
    """A second service with the same key refuses requests for the first."""
    body = registration(record())
    header = {"Authorization": signed(keyed, KEY, "PUT", RANK, body)}
    with DiscoveryServer(key=KEY) as other:
        answer = ask(other.url, "PUT", RANK, body, headers=header)
        assert (answer.status, answer.code) == (401, "other-life")
    assert ask(keyed, "PUT", RANK, body, headers=header).status == 204


def test_an_old_signature_is_refused(keyed: str) -> None:
    asked = ("GET", "/v1/instances")
    old = sign(KEY.http, life_of(keyed), *asked, b"", time.time() - 1000)
    answer = ask(keyed, *asked, headers={"Authorization": old})
    assert (answer.code, "clock" in answer.message) == ("unsigned", True)


def test_health_and_metrics_need_no_key(keyed: str) -> None:
    ask(keyed, "PUT", RANK, registration(record()), KEY)
    assert ask(keyed, "GET", "/healthz").status == 200
    text = ask(keyed, "GET", "/metrics").body.decode()
    assert "kvferry_discovery_ranks 1.0" in text
    assert "kvferry_discovery_instances 1.0" in text
    assert "kvferry_discovery_complete_instances 0.0" in text
    path = "/v1/instances/{name}/ranks/{rank}"
    assert f'requests_total{{route="PUT {path}",status="204"}} 1.0' in text


def test_without_a_key_only_loopback_is_allowed() -> None:
    with pytest.raises(InputError, match="make a cluster key with `kvferry key FILE`"):
        DiscoveryServer("0.0.0.0")
    with DiscoveryServer("0.0.0.0", key=KEY) as server:
        assert server.url.startswith("http://0.0.0.0:")


def test_ipv6_loopback_is_allowed() -> None:
    with DiscoveryServer("::1") as server:
        assert complete(server.url).name == "p"


def test_a_used_port_is_refused(url: str) -> None:
    port = urlsplit(url).port
    assert port is not None
    with pytest.raises(InputError, match="Address already in use; choose another"):
        DiscoveryServer(port=port).start()
    with pytest.raises(InputError, match="a port is between"):
        DiscoveryServer(port=70000)
