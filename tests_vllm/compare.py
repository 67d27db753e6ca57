"""Time to the first decoded token with kvferry and with vLLM's NixlConnector.

One pair of engines runs at a time, TP1 to TP1 on this machine's CPU. Both get the same prompts in
sequence, first at prefill and then at decode; kvferry's pair also gets them in parallel, as from
its router. Every answer is compared with that of the pair's prefill alone. Ends in one JSON line.

Usage: python -m tests_vllm.compare [--repeats N] [--transport NAME]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

from kvferry.testing.ports import later_port
from tests_vllm.models import plain
from tests_vllm.servers import Deployment, Json, Server, complete, log, timed, token_ids

LENGTHS = (64, 384)
ANSWER = 4


class Pair(NamedTuple):
    """A prefill engine and a decode engine."""

    prefill: Server
    decode: Server


class Timed(NamedTuple):
    """Time of the first token, and the answer."""

    first_s: float
    tokens: list[int]


def streamed(server: Server, body: Json) -> Timed:
    """Request a stream; return the seconds to the first token, and the answer."""
    began, first_s, tokens = time.monotonic(), 0.0, []
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line[6:])["choices"]
        if choices and choices[0].get("token_ids"):
            first_s = first_s or time.monotonic() - began
            tokens += choices[0]["token_ids"]
    connection.close()
    return Timed(first_s, tokens)


def body(prompt: list[int], max_tokens: int, params: Json) -> Json:
    asked: Json = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return asked | {"return_token_ids": True, "kv_transfer_params": params}


PROXY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def in_turn(pair: Pair, prompt: list[int]) -> Timed:
    """Send a request in sequence, as vLLM's proxies do."""
    began = time.monotonic()
    params = complete(pair.prefill, prompt, 1, kv_transfer_params=PROXY)["kv_transfer_params"]
    asked = time.monotonic()
    answer = streamed(pair.decode, body(prompt, ANSWER, params))
    return Timed(answer.first_s + asked - began, answer.tokens)


def at_once(pair: Pair, prompt: list[int]) -> Timed:
    """Send a request in parallel, as kvferry's router does."""
    own: Json = {"room": secrets.token_hex(8)}
    first = {"do_remote_decode": True, "kvferry": own}
    second = {"do_remote_prefill": True, "kvferry": own | {"prefill": "prefill-0"}}
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(complete, pair.prefill, prompt, 1, kv_transfer_params=first)
        answer = streamed(pair.decode, body(prompt, ANSWER, second))
        computed.result()
    return answer


def prompt_of(length: int, number: int) -> list[int]:
    """Return token ids with a unique beginning."""
    return [1000 + number, *((7 * i) % 997 + 500 for i in range(length - 1))]


Way = Callable[[Pair, list[int]], Timed]


def measured(pair: Pair, ways: Mapping[str, Way], repeats: int) -> dict[int, Json]:
    """Return the medians in milliseconds, by prompt length."""
    rows: dict[int, Json] = {}
    for length in LENGTHS:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(repeats + 1):
            prompt = prompt_of(length, number)
            answers = {name: way(pair, prompt) for name, way in ways.items()}
            alone = token_ids(complete(pair.prefill, prompt, ANSWER))
            for name, answer in answers.items():
                assert answer.tokens == alone, f"{name} answers otherwise than one engine"
                if number:  # the first one also connects
                    seconds[name].append(answer.first_s)
        rows[length] = {name: round(1e3 * median(each), 1) for name, each in seconds.items()}
        log(f"{length} tokens: " + ", ".join(f"{k} {ms} ms" for k, ms in rows[length].items()))
    return rows


def started(
    deployment: Deployment, connector: str, transport: str, times: Path | None = None
) -> Pair:
    """Start prefill and decode with a connector, without prefix caching.

    ``times``: a folder for the sums of ``timed_connectors.py``. The workers then run in the
    engines' processes, as on a GPU. Otherwise vLLM's default on a CPU applies.
    """
    made = []
    for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer: Json = {"kv_connector": connector, "kv_role": role, "kv_buffer_device": "cpu"}
        if connector == "KVFerryConnector":
            transfer = deployment.connector(role, f"{side}-0", transport=transport)
        if times is not None:
            transfer["kv_connector"] = f"Timed{connector}"
            transfer["kv_connector_module_path"] = "tests_vllm.timed_connectors"
        made.append(
            deployment.vllm(
                *(side, plain()),
                transfer=transfer,
                more="--no-enable-prefix-caching",
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(later_port()),
                VLLM_ENABLE_V1_MULTIPROCESSING="1" if times is None else "0",
                HOOK_TIMES=str((times or Path()) / side),
            )
        )
    for server in made:
        server.wait_until_up()
    return Pair(*made)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transport", default="nixl")
    asked = parser.parse_args()
    found: dict[int, Json] = {length: {} for length in LENGTHS}
    loads: list[float] = []
    for connector, ways in (
        ("KVFerryConnector", {"kvferry": in_turn, "kvferry, both at once": at_once}),
        ("NixlConnector", {"NixlConnector": in_turn}),
    ):
        with Deployment() as deployment:
            with timed(f"prefill and decode with {connector}"):
                pair = started(deployment, connector, asked.transport)
            loads.append(round(os.getloadavg()[0], 1))
            for length, row in measured(pair, ways, asked.repeats).items():
                found[length] |= row
            loads.append(round(os.getloadavg()[0], 1))
    rows = [{"tokens": length} | row for length, row in found.items()]
    told = {"repeats": asked.repeats, "load before and after each pair": loads, "rows": rows}
    print(json.dumps({"benchmark": "vllm-first-token"} | told))


if __name__ == "__main__":
    main()
