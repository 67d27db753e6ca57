"""The reference engine on one side and SGLang on the other."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Servers
from pairs import NUM_TOKENS, new_room
from prompts import LONG, SHORT
from reference import Reference
from servers import Server, environment, post, wait_until_up

from kvferry import DiscoveryServer
from kvferry.testing.ports import later_port

DEADLINE_S = 60.0


@contextmanager
def worker(role: str, discovery: str, model: Path, folder: Path) -> Iterator[str]:
    """Start a worker of the reference engine with one rank."""
    port, log = later_port(), folder / f"reference-{role}.log"
    command = [
        *(sys.executable, "-m", "kvferry", "serve", role, "--name", f"reference-{role}"),
        *("--layout", "tp=1,page=8", "--discovery", discovery, "--model", str(model)),
        *("--transport", "nixl", "--port", str(port)),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(1, folder), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/healthz", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def reference_body(model: Path, prompt: list[int], transfer: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a completion request to the reference engine."""
    return {
        "model": model.name,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "seed": 1,
        "kvferry": {"deadline_s": DEADLINE_S, **transfer},
    }


def sglang_body(prompt: list[int], port: int, room: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
        },
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
    }


def post_to_both(
    prefill_url: str,
    prefill_body: dict[str, Any],
    decode_url: str,
    decode_body: dict[str, Any],
) -> dict[str, Any]:
    """Send a request to prefill and decode at the same time, and return decode's response."""
    thread = threading.Thread(target=post, args=(prefill_url, prefill_body), daemon=True)
    thread.start()
    answer = post(decode_url, decode_body)
    if "error" not in answer:
        thread.join()
    return answer


@pytest.fixture(scope="module")
def reference_prefill(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    with (
        DiscoveryServer() as discovery,
        worker("prefill", discovery.url, model, folder) as url,
    ):
        yield url, int(discovery.url.rpartition(":")[2])


@pytest.fixture(scope="module")
def reference_decode(servers: Servers, model: Path, folder: Path) -> Iterator[str]:
    with worker(
        "decode", f"http://127.0.0.1:{servers.prefill_tp1.bootstrap}", model, folder
    ) as url:
        yield url


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_sglang_decodes_after_reference_prefill(
    reference_prefill: tuple[str, int],
    servers: Servers,
    reference: Reference,
    model: Path,
    text: str,
) -> None:
    url, port = reference_prefill
    prompt, room = reference.ids(text), new_room()
    answer = post_to_both(
        f"{url}/v1/completions",
        reference_body(model, prompt, {"room": room}),
        f"{servers.decode.url}/generate",
        sglang_body(prompt, port, room),
    )
    assert answer.get("output_ids") == reference.answer(prompt, NUM_TOKENS), answer


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_reference_engine_decodes_after_sglang_prefill(
    reference_decode: str, servers: Servers, reference: Reference, model: Path, text: str
) -> None:
    prompt, room = reference.ids(text), new_room()
    transfer = {"room": room, "prefill": instance(servers.prefill_tp1)}
    answer = post_to_both(
        f"{servers.prefill_tp1.url}/generate",
        sglang_body(prompt, servers.prefill_tp1.bootstrap, room),
        f"{reference_decode}/v1/completions",
        reference_body(model, prompt, transfer),
    )
    expected = reference.text(reference.answer(prompt, NUM_TOKENS))
    assert answer.get("choices", [{}])[0].get("text") == expected, answer


def instance(server: Server) -> str:
    """Return the name under which a prefill server's only replica is registered."""
    return f"sglang/127.0.0.1:{server.bootstrap}/dp0of1"
