"""Dashboard routes of the discovery service: access, documents and errors."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import msgspec
import pytest
from discovery.parts import ask
from telemetry.scenes import Scene, failures

from kvferry.dashboard.client import StatusClient, StatusUnavailable
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.errors import InputError
from kvferry.security.keys import ClusterKey
from kvferry.security.tokens import make_token, token_problem
from kvferry.telemetry.status import ClusterStatus

KEY = ClusterKey.new()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_token_is_valid_until_it_expires() -> None:
    token = make_token(KEY.http, 1000.0)
    assert token_problem(KEY.http, f"Bearer {token}", 999.0) is None
    for header, now, words in (
        (f"Bearer {token}", 1001.0, "expired"),
        (f"Bearer {token.replace('1000', '9000')}", 999.0, "another cluster key"),
        (f"Bearer {make_token(ClusterKey.new().http, 1000.0)}", 999.0, "another cluster key"),
        ("Bearer hello", 999.0, "not a read-only token"),
        ("", 999.0, "needs a token"),
    ):
        assert words in (token_problem(KEY.http, header, now) or "")


def test_a_token_only_opens_the_dashboards_documents() -> None:
    with DiscoveryServer(key=KEY) as server:
        good = bearer(make_token(KEY.http, time.time() + 60))
        assert ask(server.url, "GET", "/").status == 200
        assert ask(server.url, "GET", "/kvferry/page/page.js").status == 200
        assert ask(server.url, "GET", "/kvferry/page/secrets").status == 404
        for path in ("/kvferry/cluster", "/kvferry/traces/1", "/kvferry/plan"):
            assert ask(server.url, "GET", path).code == "unsigned"
        assert ask(server.url, "GET", "/kvferry/cluster", headers=good).status == 200
        assert ask(server.url, "GET", "/kvferry/cluster", key=KEY).status == 200
        for method, path in (
            ("GET", "/v1/instances"),
            ("PUT", "/v1/instances/p/ranks/0/view"),
            ("DELETE", "/v1/instances/p/ranks/0?incarnation=1"),
        ):
            assert ask(server.url, method, path, headers=good).code == "unsigned"


def test_a_report_must_match_its_path() -> None:
    with DiscoveryServer() as server:
        scene = Scene(server.url, {"p": 1}, {"d": 1})
        body = msgspec.json.encode(scene.view("target", "d", 0, 1))
        assert ask(server.url, "PUT", "/v1/instances/e/ranks/0/view", body).code == "malformed"
        assert ask(server.url, "PUT", "/v1/instances/d/ranks/0/view", body).status == 200
        gone = "/v1/instances/d/ranks/0/view?incarnation=1"
        assert ask(server.url, "DELETE", gone).status == 204
        assert ask(server.url, "DELETE", gone).code == "no-lease"


def test_the_client_reads_status_and_plans() -> None:
    with DiscoveryServer() as server:
        scene = Scene(server.url, {"p": 2}, {"d": 1})
        scene.flows, scene.failures = True, failures()
        scene.tell()
        scene.tell()
        view = StatusClient(server.url).cluster()
        assert [(one.name, one.note, len(one.ranks)) for one in view.instances] == [
            ("p", "", 2),
            ("d", "", 1),
        ]
        assert view.bytes_per_s > 0
        assert [one.code for one in view.failures] == ["peer-gone", "deadline", "aborted"]
        plan = ask(server.url, "GET", "/kvferry/plan?source=p&target=d")
        ElementTree.fromstring(plan.body)
        nobody = ask(server.url, "GET", "/kvferry/plan?source=p&target=nobody")
        assert "nobody" in nobody.message
        assert msgspec.json.decode(msgspec.json.encode(view), type=ClusterStatus) == view


def test_an_unknown_room_is_an_error_at_once() -> None:
    nobody = pytest.raises(StatusUnavailable, match="no endpoint remembers the room 17")
    with DiscoveryServer() as server, nobody:
        StatusClient(server.url).trace("17")
    with pytest.raises(StatusUnavailable, match="cannot reach"):
        StatusClient(server.url).cluster()
    with pytest.raises(InputError, match="give one like"):
        StatusClient("nonsense")
