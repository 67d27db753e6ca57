"""Commands that query a running cluster: trace, top and tokens, against a real discovery."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from telemetry.scenes import Scene, failures

from kvferry.cli.main import main
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.security.keys import ClusterKey
from kvferry.security.tokens import token_problem


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Run a cluster of simulated endpoints while the block lasts."""
    with DiscoveryServer() as server:
        made = Scene(server.url, {"prefill-0": 2}, {"decode-0": 1})
        made.flows, made.failures = True, failures()
        made.tell()
        over = threading.Event()

        def keep_telling() -> None:
            while not over.wait(0.05):
                made.tell()

        thread = threading.Thread(target=keep_telling)
        thread.start()
        try:
            yield made
        finally:
            over.set()
            thread.join()


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_trace_prints_a_room(capsys: pytest.CaptureFixture[str]) -> None:
    with scene() as here:
        words = ["trace", "17", "--url", here.url]
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert main([*words, "--json"]) == 0
    for word in ("room 17", "stages", "prefill-0/1", "gathered", "scattered", "done"):
        assert word in printed
    trace = document(capsys)
    assert (trace["room"], trace["outcome"]) == ("17", "done")
    assert sum(trace["stages"].values()) == pytest.approx(trace["seconds"])


def test_trace_lists_the_slowest_rooms(capsys: pytest.CaptureFixture[str]) -> None:
    with scene() as here:
        assert main(["trace", "--slow", "--url", here.url]) == 0
        printed = capsys.readouterr().out
        assert main(["trace", "--slow", "--json", "--url", here.url]) == 0
    rooms = document(capsys)["rooms"]
    assert len(rooms) == 6
    assert all(room["room"] in printed and room["request"] in printed for room in rooms)
    assert rooms == sorted(rooms, key=lambda room: -room["seconds"])


def test_top_prints_the_clusters_status(capsys: pytest.CaptureFixture[str]) -> None:
    with scene() as here:
        assert main(["top", "--once", "--url", here.url]) == 0
        printed = capsys.readouterr().out
        assert main(["top", "--json", "--url", here.url]) == 0
    view = document(capsys)
    for one in view["instances"]:
        assert one["name"] in printed
    assert "3/3 ranks up" in printed
    assert "peer-gone: lost prefill-1/2" in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["trace"], "either the id of a room or --slow"),
        (["trace", "17", "--slow"], "either the id of a room or --slow"),
        (["top", "--url", "nonsense"], "not the URL of a router"),
        (["trace", "1", "--token", "a", "--key", "b"], "give one of them"),
        (["key", "/nowhere/k", "--days", "3"], "--days is for a token"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert why in capsys.readouterr().err


def test_an_unreachable_url_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot reach" in capsys.readouterr().err


def test_a_key_makes_tokens_that_expire(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "cluster.key")
    assert main(["key", file]) == 0
    capsys.readouterr()
    assert main(["key", file, "--token", "--days", "7", "--json"]) == 0
    made = document(capsys)
    key = ClusterKey.read(file).http
    assert token_problem(key, f"Bearer {made['token']}", made["until"] - 1) is None
    assert token_problem(key, f"Bearer {made['token']}", made["until"] + 1) is not None
