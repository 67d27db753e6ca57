"""A whole cluster loses a part at a time: the others go on, answers are right, nothing stays."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from serve.clusters import PATIENCE_S, Running, running, segments, wait_until
from serve.conftest import Models

from kvferry.serve.launch import Child
from kvferry.serve.tiny import Kind

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Over several pages and chunks.
PROMPTS = [f"{i}: " + "The quick brown fox jumps over the lazy dog. " * (3 + i) for i in range(6)]
MAX_TOKENS = 12
FULL = 2048


@pytest.fixture(scope="module")
def cluster(models: Models) -> Iterator[Running]:
    before = segments()
    small = {"step_tokens": 64, "cache_tokens": FULL, "prefix_cache": False}
    sides = {
        "prefill": [{"tp": 3, **small}, small],
        "decode": [{"instances": 2, **small}],
    }
    with running(models[Kind.LLAMA], **sides) as here:
        yield here
        children = [child.process.pid for child in here.launch.children if child.process]
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    wait_until(lambda: not segments() - before, "shared memory to be given back")


@pytest.fixture(autouse=True)
def nothing_stays(cluster: Running) -> Iterator[None]:
    cluster.wait_up(*WORKERS)
    yield
    cluster.wait_up(*WORKERS)
    cluster.wait_idle(*WORKERS)
    wait_until(
        lambda: not any(worker["in_flight"] for worker in cluster.workers().values()),
        "the router to be idle",
    )


@pytest.fixture(scope="module")
def expected(cluster: Running) -> list[list[int]]:
    """Made when first asked for, which is after the cluster has answered."""
    return cluster.expected(PROMPTS, MAX_TOKENS)


def complete(cluster: Running, prompt: str, on_failure: str, **fields: object) -> tuple[int, Any]:
    where = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        "kvferry": {"on_failure": on_failure},
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body | fields))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def tokens(document: Any) -> list[int]:
    return list(document["choices"][0]["token_ids"])


class Asking:
    """All prompts at once, in the background."""

    def __init__(self, cluster: Running, on_failure: str) -> None:
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self.answers: list[Future[tuple[int, Any]]] = [
            self._pool.submit(complete, cluster, prompt, on_failure) for prompt in PROMPTS
        ]

    def results(self) -> list[tuple[int, Any]]:
        try:
            return [answer.result(PATIENCE_S) for answer in self.answers]
        finally:
            self._pool.shutdown()


def end(child: Child, number: signal.Signals) -> None:
    assert child.process is not None
    child.process.send_signal(number)


def kill_while_busy(cluster: Running, name: str, on_failure: str) -> list[tuple[int, Any]]:
    """Stop a worker, ask, kill it once it has something to do, and start it again."""
    child = cluster[name]
    end(child, signal.SIGSTOP)
    asking = Asking(cluster, on_failure)
    wait_until(lambda: cluster.workers()[name]["in_flight"], f"{name} to be busy")
    end(child, signal.SIGKILL)
    results = asking.results()
    assert child.process is not None
    child.process.wait(PATIENCE_S)
    restart(cluster, child)
    return results


def restart(cluster: Running, child: Child) -> None:
    assert child.process is not None
    for pipe in (child.process.stdin, child.process.stdout):
        assert pipe is not None
        pipe.close()
    child.start(None)
    cluster.launch.wait_ready([child])


def decode_is_busy(cluster: Running) -> bool:
    return any(cluster.health(name)["running"] for name in ("decode-0", "decode-1"))


def demand_right(results: list[tuple[int, Any]], expected: list[list[int]]) -> None:
    assert [status for status, _ in results] == [200] * len(expected)
    assert [tokens(document) for _, document in results] == expected


def test_all_is_well(cluster: Running, request: pytest.FixtureRequest) -> None:
    results = Asking(cluster, "fail").results()
    assert all(document["kvferry"]["source"] == "transferred" for _, document in results)
    demand_right(results, request.getfixturevalue("expected"))


@pytest.mark.parametrize("on_failure", ["retry", "local"])
def test_a_prefill_worker_dies_in_the_middle(
    cluster: Running, on_failure: str, expected: list[list[int]]
) -> None:
    demand_right(kill_while_busy(cluster, "prefill-0", on_failure), expected)
    demand_right(Asking(cluster, "fail").results(), expected)


def test_who_wants_the_reason_gets_it(cluster: Running, expected: list[list[int]]) -> None:
    results = kill_while_busy(cluster, "prefill-1", "fail")
    failed = [document["error"] for status, document in results if status != 200]
    assert failed
    assert all(error["type"] == "server_error" and error["message"] for error in failed)
    right = [(i, document) for i, (status, document) in enumerate(results) if status == 200]
    assert all(tokens(document) == expected[i] for i, document in right)


def test_a_decode_worker_dies_in_the_middle(cluster: Running, expected: list[list[int]]) -> None:
    demand_right(kill_while_busy(cluster, "decode-0", "retry"), expected)
    demand_right(Asking(cluster, "fail").results(), expected)


def test_the_rendezvous_dies(cluster: Running, expected: list[list[int]]) -> None:
    child = cluster["rendezvous"]
    end(child, signal.SIGKILL)
    assert child.process is not None
    child.process.wait(PATIENCE_S)
    demand_right(Asking(cluster, "fail").results(), expected)
    restart(cluster, child)
    demand_right(Asking(cluster, "fail").results(), expected)
    # Who has restarted meanwhile is found again.
    demand_right(kill_while_busy(cluster, "prefill-0", "local"), expected)
    cluster.wait_up("prefill-0")
    demand_right(Asking(cluster, "fail").results(), expected)


def test_a_client_leaves_in_the_middle(cluster: Running, expected: list[list[int]]) -> None:
    where = urlsplit(cluster.url)
    for stream in (True, False):
        connection = http.client.HTTPConnection(
            where.hostname or "", where.port, timeout=PATIENCE_S
        )
        body = {"prompt": "x" * 300, "max_tokens": 1600, "ignore_eos": True, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body))
        if stream:
            assert connection.getresponse().read(10)
        else:
            wait_until(lambda: decode_is_busy(cluster), "decode to be busy")
        connection.close()
        cluster.wait_idle(*WORKERS)
    demand_right(Asking(cluster, "fail").results(), expected)
