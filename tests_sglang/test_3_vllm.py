"""SGLang on one side and vLLM on the other: both reject the pair with a reason.

On a CPU, vLLM keeps K column by column inside a block. What is refused is that, at the handshake:
not the model, whose fingerprints agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Cast
from pairs import NUM_TOKENS, new_room
from prompts import SHORT
from reference import Reference
from servers import ROOT, post
from test_3_engines import instance, sglang_body
from test_4_aborts_and_deaths import is_idle, until

from kvferry import DiscoveryServer
from kvferry.testing.ports import later_port
from tests_vllm.servers import Server as Vllm
from tests_vllm.servers import environment

VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
VLLM = VENV / "bin" / "vllm"
# The least that vLLM takes on a CPU.
BLOCK_TOKENS = 32
# Blocks whose K is not by tokens have a name of their own.
THEIRS = f"blocks_of_{BLOCK_TOKENS}_tokens"
DIFFER = "so one can't read the other's; use engines"

pytestmark = pytest.mark.skipif(
    not VLLM.exists(),
    reason=f"there is no {VLLM}: make it with scripts/vllm-env, and name its folder in VLLM_VENV",
)


def start(role: str, discovery: str, model: Path, folder: Path) -> Vllm:
    """Begin to start one, with kvferry's connector, at a discovery service."""
    port, points = later_port(), folder / "vllm-points"
    subprocess.run([sys.executable, ROOT / "scripts" / "entry-points", points], check=True)
    own = {"discovery": discovery, "instance": f"vllm-{role}"}
    transfer: dict[str, Any] = {"kv_connector": "KVFerryConnector", "kv_role": role}
    transfer |= {"kv_load_failure_policy": "fail", "kv_connector_extra_config": own}
    command = [
        *(str(VLLM), "serve", str(model), "--port", str(port), "--host", "127.0.0.1"),
        *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    server = Vllm(role, command, port, environment(points))
    print(f"starting vLLM as {role}, log {server.log}", flush=True)
    return server


class Neighbours(NamedTuple):
    """A vLLM that prefills, the port of its discovery service, and one that decodes SGLang's."""

    prefill: Vllm
    port: int
    decode: Vllm


@pytest.fixture(scope="module")
def neighbours(cast: Cast, model: Path, folder: Path) -> Iterator[Neighbours]:
    with DiscoveryServer() as discovery, ExitStack() as stack:
        prefill = start("kv_producer", discovery.url, model, folder)
        stack.callback(prefill.stop)
        decode = start("kv_consumer", f"http://127.0.0.1:{cast.one.bootstrap}", model, folder)
        stack.callback(decode.stop)
        for each in (prefill, decode):
            each.wait_until_up()
        yield Neighbours(prefill, int(discovery.url.rpartition(":")[2]), decode)


def vllm_body(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "kv_transfer_params": params,
    }


def ask_beside(url: str, body: dict[str, Any]) -> None:
    """The side that computes; nobody waits for what it says."""
    threading.Thread(target=post, args=(url, body), daemon=True).start()


def test_sglang_rejects_vllm_prefill(
    neighbours: Neighbours, cast: Cast, reference: Reference
) -> None:
    prompt, room = reference.ids(SHORT), new_room()
    params = {"do_remote_decode": True, "kvferry": {"room": room}}
    ask_beside(f"{neighbours.prefill.url}/v1/completions", vllm_body(prompt, params))
    answer = post(f"{cast.decode.url}/generate", sglang_body(prompt, neighbours.port, room))
    assert answer.get("status") == 500, answer
    assert f"the tensors {THEIRS} at prefill and k, v at decode, {DIFFER}" in answer["error"]


def test_vllm_rejects_sglang_prefill(
    neighbours: Neighbours, cast: Cast, reference: Reference
) -> None:
    """vLLM answers just that it failed; why is in its log."""
    prompt, room = reference.ids(SHORT), new_room()
    own = {"room": room, "prefill": instance(cast.one), "tokens": len(prompt)}
    params = {"do_remote_prefill": True, "kvferry": own}
    asked = sglang_body(prompt, cast.one.bootstrap, room) | {"rid": "for-vllm"}
    ask_beside(f"{cast.one.url}/generate", asked)
    answer = post(f"{neighbours.decode.url}/v1/completions", vllm_body(prompt, params))
    assert answer.get("status") == 500, answer
    said = f"the tensors k, v at prefill and {THEIRS} at decode, {DIFFER}"
    until(lambda: said in neighbours.decode.log.read_text(errors="replace"), "vLLM never said it")
    # Prefill would wait for its own deadline, for a decode that does not come.
    until(lambda: not is_idle(cast.one), "prefill never had the request")
    post(f"{cast.one.url}/abort_request", {"rid": "for-vllm"})
    until(lambda: is_idle(cast.one), "prefill still has the request")
