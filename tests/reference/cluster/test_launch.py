"""``kvferry serve`` as a process: one command starts everything, and nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.clusters import (
    PATIENCE_S,
    demand_gone,
    family,
    post,
    processes,
    segments,
    wait_until,
)
from running import heed_interrupts

from kvferry.errors import InputError
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoverySection,
    WorkerSection,
)
from kvferry.reference.cluster.launch import ClusterLaunch
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.models.tiny import TinyKind
from kvferry.router.options import RouterOptions

Start = Callable[..., subprocess.Popen[str]]
CLEAN = {name: value for name, value in os.environ.items() if name != "KVFERRY_KEY_FILE"}


@pytest.fixture
def start() -> Iterator[Start]:
    heed_interrupts()
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=CLEAN,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def children(pid: int) -> list[int]:
    """In the order in which they were started."""
    return sorted(child for child, parent in processes().items() if parent == pid)


def answer(url: str) -> Any:
    status, document = post(url, {"prompt": "hello", "max_tokens": 4, "temperature": 0})
    assert status == 200, document
    return document


def test_the_others_go_on_without_a_worker_and_ctrl_c_ends_everything(start: Start) -> None:
    process = start("serve", "--tiny", "--prefill", "tp=1", "--port", "0", "--json")
    told = first_line(process)
    assert (told["model"], set(told["parts"])) == (
        "tiny",
        {"discovery", "router", "prefill-0", "decode-0"},
    )
    said = answer(told["url"])
    assert said["kvferry"]["source"] == "transferred"

    *_before, _discovery, prefill, _decode, _router = children(process.pid)
    os.kill(prefill, signal.SIGKILL)
    again = answer(told["url"])
    assert again["kvferry"]["source"] == "recomputed"
    assert again["choices"] == said["choices"]

    parts = family(process.pid)
    files = segments(parts)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert "ended name=prefill-0 status=-9" in err
    assert files
    demand_gone(parts, files)


def test_the_router_starts_once_all_workers_are_ready(start: Start) -> None:
    """Before that it would have decode compute prompts."""
    process = start("serve", "--tiny", "--prefill", "tp=3", "--port", "0", "--json")
    told = first_line(process)
    assert list(told["parts"])[-1] == "router"
    answers = [answer(told["url"])["kvferry"]["source"] for _ in range(5)]
    assert answers == 5 * ["transferred"]


def test_without_its_router_a_cluster_ends(start: Start) -> None:
    process = start("serve", "--tiny", "--prefill", "tp=1", "--port", "0", "--json")
    first_line(process)
    parts = family(process.pid)
    *_before, _discovery, _prefill, _decode, router = children(process.pid)
    os.kill(router, signal.SIGKILL)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert json.loads(out)["error"] == "router ended with status -9; see its log"
    demand_gone(parts, set())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_command(start: Start, number: signal.Signals) -> None:
    """Also not ranks, and not when it is killed while they are still being started."""
    process = start("serve", "--tiny", "--prefill", "tp=3", "--port", "0", "--json")
    if number is signal.SIGKILL:
        first_line(process)
    else:
        wait_until(lambda: len(family(process.pid)) >= 4, "its parts to be started")
    parts = family(process.pid)
    files = segments(parts)
    process.send_signal(number)
    demand_gone(parts, files)


def test_ctrl_c_while_it_starts_is_one_line(start: Start) -> None:
    process = start("serve", "--tiny", "--prefill", "tp=3", "--port", "0", "--json")
    wait_until(lambda: len(family(process.pid)) >= 4, "its parts to be started")
    parts = family(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "kvferry: interrupted\n")
    demand_gone(parts, set())


def test_a_part_that_cannot_start_is_reported_in_one_sentence(start: Start) -> None:
    process = start("serve", "--tiny", "--host", "0.0.0.0", "--port", "0", "--json")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert json.loads(out)["error"].startswith("router: listening on 0.0.0.0 without")
    assert err == f"kvferry: {json.loads(out)['error']}\n"


@pytest.mark.parametrize("part", ["discovery", "router", "decode-0"])
def test_a_port_in_use_is_one_sentence(part: str, models: dict[TinyKind, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"discovery": 0, "router": 0, "decode-0": 0, part: port}
        cluster = ClusterDescription(
            discovery=DiscoverySection(port=ports["discovery"]),
            router=RouterOptions(port=ports["router"]),
            decode=(WorkerSection(port=ports["decode-0"]),),
        )
        model = ModelFolder(models[TinyKind.LLAMA], "small")
        with (
            ClusterLaunch() as launch,
            pytest.raises(InputError, match=f"^{part}: cannot listen on 127.0.0.1.*{port}"),
        ):
            launch.start_all(cluster, model, lambda *_: None)
