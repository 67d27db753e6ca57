"""SGLang on one side and vLLM on the other, in both directions.

On a CPU, vLLM stores K by columns inside a block, which the copy translates. Blocks and pages have
different sizes. vLLM's prefill passes on the first token, from which SGLang's decode continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Servers
from marked_rooms import marked, unmarked
from pairs import NUM_TOKENS, new_room
from prompts import LONG, MANY, SHORT
from reference import Reference
from servers import HERE, ROOT, Server
from test_3_engines import instance, post_to_both, sglang_body

from kvferry import DiscoveryServer
from kvferry.testing.ports import later_port
from tests_vllm.servers import Server as Vllm
from tests_vllm.servers import environment

VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
VLLM = VENV / "bin" / "vllm"
# The smallest block that vLLM has on a CPU.
BLOCK_TOKENS = 32

pytestmark = pytest.mark.skipif(
    not VLLM.exists(),
    reason=f"there is no {VLLM}: make it with scripts/vllm-env, and name its folder in VLLM_VENV",
)


def start(role: str, discovery: str, model: Path, folder: Path) -> Vllm:
    """Start a vLLM with kvferry's connector, and return at once."""
    port, points = later_port(), folder / "vllm-points"
    subprocess.run([sys.executable, ROOT / "scripts" / "entry-points", points], check=True)
    extra = {"discovery": discovery, "instance": f"vllm-{role}"}
    transfer: dict[str, Any] = {"kv_connector": "SpoilingConnector", "kv_role": role}
    transfer["kv_connector_module_path"] = "vllm_controls"
    transfer |= {"kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
    command = [
        *(str(VLLM), "serve", str(model), "--port", str(port), "--host", "127.0.0.1"),
        *("--served-model-name", "m", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    given = environment(points)
    given["PYTHONPATH"] += f":{HERE}"
    server = Vllm(role, command, port, given)
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
            "kv_consumer", f"http://127.0.0.1:{servers.prefill_tp3.bootstrap}", model, folder
        )
        stack.callback(decode.stop)
        for server in (prefill, decode):
            server.wait_until_up()
        yield VllmServers(prefill, int(discovery.url.rpartition(":")[2]), decode)


def vllm_body(prompt: list[int], num_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": num_tokens,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }


def from_vllm(vllm: VllmServers, servers: Servers, prompt: list[int], room: int) -> dict[str, Any]:
    """Return SGLang's response to a prompt that vLLM prefills."""
    own = {"room": room, "first_token": True}
    params = {"do_remote_decode": True, "kvferry": own}
    return post_to_both(
        f"{vllm.prefill.url}/v1/completions",
        vllm_body(prompt, 1, params),
        f"{servers.decode.url}/generate",
        sglang_body(prompt, vllm.port, room),
    )


def from_sglang(vllm: VllmServers, prefill: Server, prompt: list[int], room: int) -> dict[str, Any]:
    """Return vLLM's response to a prompt that SGLang prefills."""
    transfer = {"room": room, "prefill": instance(prefill), "tokens": len(prompt)}
    params = {"do_remote_prefill": True, "kvferry": transfer}
    return post_to_both(
        f"{prefill.url}/generate",
        sglang_body(prompt, prefill.bootstrap, room),
        f"{vllm.decode.url}/v1/completions",
        vllm_body(prompt, NUM_TOKENS, params),
    )


def vllm_ids(answer: dict[str, Any]) -> list[int]:
    assert "choices" in answer, answer
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize("text", [SHORT, LONG, MANY[1]])
def test_sglang_decodes_after_vllm_prefill(
    vllm_servers: VllmServers, servers: Servers, reference: Reference, text: str
) -> None:
    prompt = reference.ids(text)
    answer = from_vllm(vllm_servers, servers, prompt, unmarked(new_room()))
    assert answer.get("output_ids") == reference.answer(prompt, NUM_TOKENS), answer


@pytest.mark.parametrize("text", [SHORT, LONG, MANY[2]])
def test_vllm_decodes_after_sglang_prefill(
    vllm_servers: VllmServers, servers: Servers, reference: Reference, text: str
) -> None:
    prompt = reference.ids(text)
    answer = from_sglang(vllm_servers, servers.prefill_tp3, prompt, unmarked(new_room()))
    assert vllm_ids(answer) == reference.answer(prompt, NUM_TOKENS)


def test_other_blocks_change_sglangs_answer(
    vllm_servers: VllmServers, servers: Servers, reference: Reference
) -> None:
    prompt = reference.ids(MANY[3])
    answer = from_vllm(vllm_servers, servers, prompt, marked(new_room()))
    expected = reference.answer(prompt, NUM_TOKENS)
    # The first token is prefill's own.
    assert answer["output_ids"][0] == expected[0], answer
    assert answer["output_ids"] != expected


def test_untranslated_keys_change_vllms_answer(
    vllm_servers: VllmServers, servers: Servers, reference: Reference
) -> None:
    prompt = reference.ids(MANY[4])
    answer = from_sglang(vllm_servers, servers.prefill_tp3, prompt, marked(new_room()))
    assert vllm_ids(answer) != reference.answer(prompt, NUM_TOKENS)
