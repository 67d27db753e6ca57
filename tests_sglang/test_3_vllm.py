"""SGLang on one side and vLLM on the other: both reject the pair with a reason.

On a CPU, vLLM stores K by columns inside a block, so the handshake rejects the pair. The models'
fingerprints agree.
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
from conftest import Servers
from pairs import NUM_TOKENS, new_room
from prompts import SHORT
from reference import Reference
from servers import ROOT, post
from test_3_engines import instance, sglang_body
from test_4_aborts_and_deaths import is_idle, wait_until

from kvferry import DiscoveryServer
from kvferry.testing.ports import later_port
from tests_vllm.servers import Server as Vllm
from tests_vllm.servers import environment

VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
VLLM = VENV / "bin" / "vllm"
# The smallest block that vLLM has on a CPU.
BLOCK_TOKENS = 32
# The connector names a tensor so if K is not stored by tokens.
VLLM_TENSOR = f"blocks_of_{BLOCK_TOKENS}_tokens"
DIFFER = "so one can't read the other's; use engines"

pytestmark = pytest.mark.skipif(
    not VLLM.exists(),
    reason=f"there is no {VLLM}: make it with scripts/vllm-env, and name its folder in VLLM_VENV",
)


def start(role: str, discovery: str, model: Path, folder: Path) -> Vllm:
    """Start a vLLM with kvferry's connector, and return at once."""
    port, points = later_port(), folder / "vllm-points"
    subprocess.run([sys.executable, ROOT / "scripts" / "entry-points", points], check=True)
    extra = {"discovery": discovery, "instance": f"vllm-{role}"}
    transfer: dict[str, Any] = {"kv_connector": "KVFerryConnector", "kv_role": role}
    transfer |= {"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
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


class VllmServers(NamedTuple):
    """A prefill server, the port of its discovery service, and a decode server for SGLang."""

    prefill: Vllm
    port: int
    decode: Vllm


@pytest.fixture(scope="module")
def vllm_servers(servers: Servers, model: Path, folder: Path) -> Iterator[VllmServers]:
    with DiscoveryServer() as discovery, ExitStack() as stack:
        prefill = start("kv_producer", discovery.url, model, folder)
        stack.callback(prefill.stop)
        decode = start(
            "kv_consumer", f"http://127.0.0.1:{servers.prefill_tp1.bootstrap}", model, folder
        )
        stack.callback(decode.stop)
        for server in (prefill, decode):
            server.wait_until_up()
        yield VllmServers(prefill, int(discovery.url.rpartition(":")[2]), decode)


def vllm_body(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "kv_transfer_params": params,
    }


def post_in_background(url: str, body: dict[str, Any]) -> None:
    """Send a request without waiting for its response."""
    threading.Thread(target=post, args=(url, body), daemon=True).start()


def test_sglang_rejects_vllm_prefill(
    vllm_servers: VllmServers, servers: Servers, reference: Reference
) -> None:
    prompt, room = reference.ids(SHORT), new_room()
    params = {"do_remote_decode": True, "kvferry": {"room": room}}
    post_in_background(f"{vllm_servers.prefill.url}/v1/completions", vllm_body(prompt, params))
    answer = post(f"{servers.decode.url}/generate", sglang_body(prompt, vllm_servers.port, room))
    assert answer.get("status") == 500, answer
    assert f"the tensors {VLLM_TENSOR} at prefill and k, v at decode, {DIFFER}" in answer["error"]


def test_vllm_rejects_sglang_prefill(
    vllm_servers: VllmServers, servers: Servers, reference: Reference
) -> None:
    """vLLM responds that the request failed; its log has the reason."""
    prompt, room = reference.ids(SHORT), new_room()
    transfer = {"room": room, "prefill": instance(servers.prefill_tp1), "tokens": len(prompt)}
    params = {"do_remote_prefill": True, "kvferry": transfer}
    request = sglang_body(prompt, servers.prefill_tp1.bootstrap, room) | {"rid": "for-vllm"}
    post_in_background(f"{servers.prefill_tp1.url}/generate", request)
    answer = post(f"{vllm_servers.decode.url}/v1/completions", vllm_body(prompt, params))
    assert answer.get("status") == 500, answer
    reason = f"the tensors k, v at prefill and {VLLM_TENSOR} at decode, {DIFFER}"
    log = vllm_servers.decode.log
    wait_until(lambda: reason in log.read_text(errors="replace"), "vLLM did not log the reason")
    # Abort, because no decode server comes; prefill would wait for its deadline.
    wait_until(lambda: not is_idle(servers.prefill_tp1), "prefill did not get the request")
    post(f"{servers.prefill_tp1.url}/abort_request", {"rid": "for-vllm"})
    wait_until(lambda: is_idle(servers.prefill_tp1), "prefill still has the request")
