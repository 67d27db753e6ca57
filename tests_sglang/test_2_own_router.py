"""kvferry's router in front of SGLang servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Servers
from pairs import NUM_TOKENS
from prompts import LONG, SHORT
from reference import Reference
from servers import environment, post, tail, wait_until_up

from kvferry.testing.ports import later_port

WORKERS_S = 30.0


@pytest.fixture(scope="module")
def own_router(servers: Servers, folder: Path) -> Iterator[str]:
    """Start kvferry's router for both prefill servers."""
    port, log = later_port(), folder / "own-router.log"
    prefills = [
        flag
        for server in (servers.prefill_tp1, servers.prefill_tp3)
        for flag in ("--prefill-url", f"127.0.0.1:{server.bootstrap}={server.url}")
    ]
    command = [
        *(sys.executable, "-m", "kvferry", "serve", "router", "--engine", "sglang", *prefills),
        *("--decode-url", servers.decode.url, "--port", str(port)),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(1, folder), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/healthz", process, log)
        wait_until_all_up(f"http://127.0.0.1:{port}/healthz", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_until_all_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the router has found every server healthy."""
    deadline = time.monotonic() + WORKERS_S
    while True:
        with urllib.request.urlopen(url, timeout=5) as answer:
            workers = json.load(answer)["workers"]
        if all(worker["up"] for worker in workers):
            return
        assert process.poll() is None, f"the router has died:\n{tail(log)}"
        assert time.monotonic() < deadline, f"not all are up: {workers}\n{tail(log)}"
        time.sleep(0.2)


@pytest.mark.parametrize("texts", [[SHORT], [LONG], [SHORT, LONG]], ids=["short", "long", "both"])
def test_kvferrys_router_serves_two_prefill_servers(
    own_router: str, reference: Reference, texts: list[str]
) -> None:
    prompts = [reference.ids(text) for text in texts]
    body = {
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    answer = post(f"{own_router}/v1/completions", body)
    expected = [reference.text(reference.answer(prompt, NUM_TOKENS)) for prompt in prompts]
    assert [choice["text"] for choice in answer.get("choices", [])] == expected, answer
