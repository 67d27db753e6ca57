"""The case of a vLLM prefill that is terminated under load."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gpu_engines.checklist import eventually, expect_equal
from gpu_engines.client import metric, post
from gpu_engines.vllm_servers import COMPLETIONS, DRAIN_S, ROOMS_DONE, body, prompt

if TYPE_CHECKING:
    from gpu_engines.vllm_cases import VllmRun

NUM_CLIENTS = 6
TOKENS = 24


def terminated_prefill_fails_no_request(run: VllmRun) -> str:
    """SIGTERM at one of two prefills behind kvferry's router, which sends what it refuses on."""
    router = run.start_router(("drain-p", "p32"), "d32", "decode")
    ending, other = run.servers["drain-p"], run.servers["p32"]
    length = run.scale.lengths[1]
    prompts = [prompt(length, f"drained-{number}") for number in range(NUM_CLIENTS)]
    wanted = [run.expected(ids, TOKENS) for ids in prompts]
    stopped = threading.Event()

    def send_requests(client: int) -> int:
        """Return how many answers were right; raise for the first that is not."""
        num_answers = 0
        while not stopped.is_set():
            answer = post(router, COMPLETIONS, body(prompts[client], TOKENS))
            tokens = answer["choices"][0]["token_ids"]
            expect_equal(tokens, wanted[client], f"request {num_answers} of client {client}")
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(send_requests, client) for client in range(NUM_CLIENTS)]
        try:
            eventually(lambda: metric(ending, ROOMS_DONE) >= NUM_CLIENTS, "drain-p transfers")
            began = time.monotonic()
            ending.process.terminate()
            eventually(lambda: ending.process.poll() is not None, "drain-p ends", DRAIN_S)
            took_s = time.monotonic() - began
            enough = metric(other, ROOMS_DONE) + NUM_CLIENTS
            eventually(lambda: metric(other, ROOMS_DONE) >= enough, "p32 goes on")
        finally:
            stopped.set()
        num_answers = sum(client.result() for client in clients)
    return f"{num_answers} requests answered; the prefill ended {took_s:.1f} s after the signal"
