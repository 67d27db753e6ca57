"""SGLang's router in front of SGLang servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Servers
from pairs import NUM_TOKENS
from prompts import LONG, SHORT
from reference import Reference
from servers import post, wait_until_up

from kvferry.testing.ports import later_port


@pytest.fixture(scope="module")
def router(servers: Servers, folder: Path) -> Iterator[str]:
    """Start sglang-router for both prefill servers."""
    port, log = later_port(), folder / "router.log"
    pairs = [
        flag
        for server in (servers.prefill_tp1, servers.prefill_tp3)
        for flag in ("--prefill", server.url, str(server.bootstrap))
    ]
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", *pairs),
        *("--decode", servers.decode.url, "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(later_port()), "--policy", "round_robin"),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/readiness", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("text", [SHORT, LONG])
@pytest.mark.parametrize("turn", ["first", "second"])
def test_sglangs_router_serves_two_prefill_servers(
    router: str, reference: Reference, text: str, turn: str
) -> None:
    """Send each prompt twice, because the router alternates between the prefill servers."""
    prompt = reference.ids(text)
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
        },
    }
    answer = post(f"{router}/generate", body)
    assert answer.get("output_ids") == reference.answer(prompt, NUM_TOKENS), answer
