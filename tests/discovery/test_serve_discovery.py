"""``kvferry serve discovery`` and ``kvferry key`` as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from discovery.parts import ENOUGH_S, ask, layout, record, wait_until

from kvferry.cli.main import main
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import InstanceView
from kvferry.security.keys import ClusterKey

WORDS = [sys.executable, "-m", "kvferry"]
CLEAN = {name: value for name, value in os.environ.items() if name != "KVFERRY_KEY_FILE"}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*WORDS, "serve", "discovery", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=CLEAN | environment,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["url"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_service_cleanly(start: Start, number: signal.Signals) -> None:
    process = start("--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("discovery on http://127.0.0.1:")
    url = line.split()[-1]
    assert ask(url, "GET", "/healthz").status == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=ENOUGH_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert f"stopped url={url}" in err


def test_json_prints_one_document(start: Start) -> None:
    process = start("--port", "0", "--json")
    assert ask(url_of(process), "GET", "/healthz").status == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=ENOUGH_S)[0] == ""


def test_a_used_port_is_refused(start: Start) -> None:
    first = start("--port", "0", "--json")
    port = str(urlsplit(url_of(first)).port)
    second = start("--port", port, "--json")
    out, err = second.communicate(timeout=ENOUGH_S)
    sentence = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert second.returncode == 2
    assert err.startswith(f"kvferry: {sentence}")
    assert json.loads(out)["error"].startswith(sentence)


def test_the_key_comes_from_the_flag_or_the_environment(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    key = ClusterKey.new()
    key.write(path)
    for process in (
        start("--port", "0", "--json", "--host", "0.0.0.0", "--key", str(path)),
        start("--port", "0", "--json", KVFERRY_KEY_FILE=str(path)),
    ):
        url = url_of(process).replace("0.0.0.0", "127.0.0.1")
        assert ask(url, "GET", "/v1/instances").status == 401
        assert ask(url, "GET", "/v1/instances", key=key).status == 200


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--host 0.0.0.0", "make a cluster key with `kvferry key FILE`"),
        ("--key /nothing/there", "cannot read the key file '/nothing/there'"),
        ("--key=", "--key is empty"),
        ("--host=", "--host is empty"),
        ("--port 70000", "a port is between 0 and 65535"),
        ("--port x", "--port must be a whole number"),
        ("--porp 1", "did you mean --port?"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["serve", "discovery", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_stopped_service_keeps_its_leases(start: Start) -> None:
    """Ranks could not renew meanwhile."""
    lease_s, views = 2.0, list[InstanceView | None]()
    process = start("--port", "0", "--json")
    url = url_of(process)
    with DiscoveryClient(url) as client:
        client.register(record(layout=layout(tp=1)), lease_s).result(ENOUGH_S)
        client.watch("p", views.append)
        wait_until(lambda: len(views) == 1)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * lease_s)
        process.send_signal(signal.SIGCONT)
        assert ask(url, "GET", "/v1/instances/p").status == 200
        assert b"kvferry_discovery_expired_leases_total 0.0" in ask(url, "GET", "/metrics").body
        assert len(views) == 1


def test_ranks_register_again_after_the_service_was_killed(start: Start) -> None:
    first = start("--port", "0", "--json")
    url = url_of(first)
    with DiscoveryClient(url) as client:
        client.register(record(layout=layout(tp=1)), 0.6).result(ENOUGH_S)
        first.kill()
        first.wait(ENOUGH_S)
        assert url_of(start("--port", str(urlsplit(url).port), "--json")) == url
        wait_until(lambda: ask(url, "GET", "/v1/instances/p").status == 200)


# ---------------------------------------------------------------- kvferry key


def test_a_key_file_is_never_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.key"
    assert main(["key", str(path)]) == 0
    key = ClusterKey.read(path)
    out, err = capsys.readouterr()
    assert out == f"wrote the cluster key {key.name} to {path}; copy it to every machine\n"
    assert err == ""
    assert main(["key", str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert "exists" in json.loads(out)["error"]
    assert ClusterKey.read(path) == key


def test_json_shows_only_the_keys_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    assert main(["key", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"file": str(path), "name": ClusterKey.read(path).name}
