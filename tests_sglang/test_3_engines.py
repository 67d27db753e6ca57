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
from conftest import Cast
from pairs import NUM_TOKENS, new_room
from prompts import LONG, SHORT
from reference import Reference
from servers import Server, environment, post, until_up

from kvferry import DiscoveryServer
from kvferry.testing.ports import later_port

DEADLINE_S = 60.0


@contextmanager
def worker(role: str, discovery: str, model: Path, folder: Path) -> Iterator[str]:
    """One of kvferry's own, with one rank."""
    port, log = later_port(), folder / f"own-{role}.log"
    command = [
        *(sys.executable, "-m", "kvferry", "serve", role, "--name", f"own-{role}"),
        *("--layout", "tp=1,page=8", "--discovery", discovery, "--model", str(model)),
        *("--transport", "nixl", "--port", str(port)),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment(1, folder), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until_up(f"http://127.0.0.1:{port}/healthz", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def own_body(model: Path, prompt: list[int], own: dict[str, Any]) -> dict[str, Any]:
    """A completion for kvferry's own engine."""
    return {
        "model": model.name,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "seed": 1,
        "kvferry": {"deadline_s": DEADLINE_S, **own},
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


def both(url: str, body: dict[str, Any], other: str, other_body: dict[str, Any]) -> dict[str, Any]:
    """Ask the first for its part, and answer with what the second says."""
    thread = threading.Thread(target=post, args=(url, body), daemon=True)
    thread.start()
    answer = post(other, other_body)
    if "error" not in answer:
        thread.join()
    return answer


@pytest.fixture(scope="module")
def own_prefill(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    with (
        DiscoveryServer() as discovery,
        worker("prefill", discovery.url, model, folder) as url,
    ):
        yield url, int(discovery.url.rpartition(":")[2])


@pytest.fixture(scope="module")
def own_decode(cast: Cast, model: Path, folder: Path) -> Iterator[str]:
    with worker("decode", f"http://127.0.0.1:{cast.one.bootstrap}", model, folder) as url:
        yield url


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_sglang_decodes_after_reference_prefill(
    own_prefill: tuple[str, int], cast: Cast, reference: Reference, model: Path, text: str
) -> None:
    url, port = own_prefill
    prompt, room = reference.ids(text), new_room()
    answer = both(
        f"{url}/v1/completions",
        own_body(model, prompt, {"room": room}),
        f"{cast.decode.url}/generate",
        sglang_body(prompt, port, room),
    )
    assert answer.get("output_ids") == reference.answer(prompt, NUM_TOKENS), answer


@pytest.mark.parametrize("text", [SHORT, LONG])
def test_reference_engine_decodes_after_sglang_prefill(
    own_decode: str, cast: Cast, reference: Reference, model: Path, text: str
) -> None:
    prompt, room = reference.ids(text), new_room()
    own = {"room": room, "prefill": instance(cast.one), "fallback": "fail"}
    answer = both(
        f"{cast.one.url}/generate",
        sglang_body(prompt, cast.one.bootstrap, room),
        f"{own_decode}/v1/completions",
        own_body(model, prompt, own),
    )
    wanted = reference.text(reference.answer(prompt, NUM_TOKENS))
    assert answer.get("choices", [{}])[0].get("text") == wanted, answer


def instance(server: Server) -> str:
    """As a prefill server's only replica is registered."""
    return f"sglang/127.0.0.1:{server.bootstrap}/dp0of1"
