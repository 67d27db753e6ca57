"""A whole cluster: the official client, and the loss of one part at a time.

The others go on, the answers that come are right, and nothing stays.
"""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from reference.clusters import (
    NAME,
    PATIENCE_S,
    Running,
    demand_gone,
    post,
    running,
    segments,
    wait_until,
)

from kvferry.reference.cluster.description import DiscoveryOptions
from kvferry.reference.cluster.launch import ChildProcess
from kvferry.reference.models.tiny import TinyKind

Models = dict[TinyKind, Path]
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Over several pages and chunks.
PROMPTS = [f"{i}: " + "The quick brown fox jumps over the lazy dog. " * (3 + i) for i in range(6)]
MAX_TOKENS = 12
PROMPT = "Once upon a time "
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
FULL = 2048
ROOM_S = 20.0


@pytest.fixture(scope="module")
def cluster(models: Models) -> Iterator[Running]:
    small = {"step_tokens": 64, "cache_tokens": FULL, "prefix_cache": False}
    fields: dict[str, Any] = {
        # Short enough that a room which nobody takes is over within the test's patience.
        "router": {"port": 0, "poll_s": 0.2, "room_s": ROOM_S},
        "prefill": [{"tp": 3, **small}, small],
        "decode": [{"instances": 2, **small}],
    }
    with running(models[TinyKind.LLAMA], **fields) as here:
        yield here
        pids = here.pids(*(child.name for child in here.launch.children))
        files = segments(pids)
    assert files
    demand_gone(pids, files)


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


def complete(cluster: Running, prompt: str, on_failure: str) -> tuple[int, Any]:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    return post(cluster.url, body | {"kvferry": {"on_failure": on_failure}})


def tokens(document: Any) -> list[int]:
    return list(document["choices"][0]["token_ids"])


class Asking:
    """All prompts at once, in the background."""

    def __init__(self, cluster: Running, *policies: str) -> None:
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self.answers: list[Future[tuple[int, Any]]] = [
            self._pool.submit(complete, cluster, prompt, on_failure)
            for prompt, on_failure in zip(PROMPTS, cycle(policies), strict=False)
        ]

    def results(self) -> list[tuple[int, Any]]:
        try:
            return [answer.result(PATIENCE_S) for answer in self.answers]
        finally:
            self._pool.shutdown()


def end(child: ChildProcess, number: signal.Signals) -> None:
    child.process.send_signal(number)


def kill_while_busy(cluster: Running, name: str, *policies: str) -> list[tuple[int, Any]]:
    """Stop a worker, ask, kill it once it has something to do, and start it again.

    Its ranks end with it, and what it had shared is given back.
    """
    child = cluster[name]
    pids = cluster.pids(name)
    # Only decode workers make any; prefill workers map them.
    others = (other for other in WORKERS[2:] if other != name)
    files = segments(pids) - segments(cluster.pids(*others))
    assert bool(files) == (name in WORKERS[2:])
    end(child, signal.SIGSTOP)
    asking = Asking(cluster, *policies)
    wait_until(lambda: cluster.workers()[name]["in_flight"], f"{name} to be busy")
    end(child, signal.SIGKILL)
    results = asking.results()
    child.process.wait(PATIENCE_S)
    demand_gone(pids, files)
    restart(cluster, child)
    return results


def restart(cluster: Running, child: ChildProcess) -> None:
    child.pipe.close()
    options = child.options
    if isinstance(options, DiscoveryOptions):
        # The others look for it where it was.
        section = replace(options.section, port=urlsplit(child.url).port)
        child.options = replace(options, section=section)
    child.start()
    cluster.launch.wait_ready([child])


def decode_is_busy(cluster: Running) -> bool:
    return any(cluster.health(name)["running"] for name in ("decode-0", "decode-1"))


def meet(cluster: Running) -> None:
    """Have every pair work together once: to meet, but not to go on, takes discovery."""
    urls = {name: worker["url"] for name, worker in cluster.workers().items()}
    for room, (prefill, decode) in enumerate(product(WORKERS[:2], WORKERS[2:])):
        body = {"model": NAME, "prompt": "hello", "max_tokens": 2, "seed": 1}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, urls[prefill], body | {"kvferry": {"room": room}})
            own = {"room": room, "prefill": prefill}
            assert post(urls[decode], body | {"kvferry": own})[0] == 200
            assert first.result(PATIENCE_S)[0] == 200


def demand_right(results: list[tuple[int, Any]], expected: list[list[int]]) -> None:
    assert [status for status, _ in results] == [200] * len(expected)
    assert [tokens(document) for _, document in results] == expected


def test_all_answers_equal_those_of_one_process(
    cluster: Running, request: pytest.FixtureRequest
) -> None:
    results = Asking(cluster, "fail").results()
    assert all(document["kvferry"]["source"] == "transferred" for _, document in results)
    demand_right(results, request.getfixturevalue("expected"))


def test_a_prefill_worker_dies_in_the_middle(cluster: Running, expected: list[list[int]]) -> None:
    demand_right(kill_while_busy(cluster, "prefill-0", "retry"), expected)
    demand_right(Asking(cluster, "fail").results(), expected)


def test_local_and_fail_policies_side_by_side(cluster: Running, expected: list[list[int]]) -> None:
    """Half of them would rather have a reason than an answer that took a detour."""
    results = kill_while_busy(cluster, "prefill-1", "local", "fail")
    demand_right(results[::2], expected[::2])
    for (status, document), right in zip(results[1::2], expected[1::2], strict=True):
        if status == 200:
            assert tokens(document) == right
        else:
            assert document["error"]["type"] == "server_error"
            assert document["error"]["message"]


def test_a_decode_worker_dies_in_the_middle(cluster: Running, expected: list[list[int]]) -> None:
    demand_right(kill_while_busy(cluster, "decode-0", "retry"), expected)
    demand_right(Asking(cluster, "fail").results(), expected)


def test_the_discovery_service_dies_in_the_middle(
    cluster: Running, expected: list[list[int]]
) -> None:
    meet(cluster)
    child = cluster["discovery"]
    end(child, signal.SIGKILL)
    child.process.wait(PATIENCE_S)
    demand_right(Asking(cluster, "fail").results(), expected)
    restart(cluster, child)
    demand_right(Asking(cluster, "fail").results(), expected)
    # The router finds restarted workers again.
    demand_right(kill_while_busy(cluster, "prefill-1", "local"), expected)
    cluster.wait_up("prefill-1")
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


# ---------------------------------------------------------------- the official client


@pytest.fixture
def client(cluster: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_completions_whole_and_streamed(client: openai.OpenAI, cluster: Running) -> None:
    whole = client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True, "kvferry": {"on_failure": "fail"}},
    )
    (choice,) = whole.choices
    assert whole.usage is not None
    assert whole.usage.total_tokens == len(PROMPT) + 12
    told = whole.model_extra
    assert told is not None
    assert told["kvferry"]["source"] == "transferred"
    assert told["kvferry"]["bytes"] > 0
    assert choice.finish_reason == "length"

    stream = client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage == whole.usage

    (tokens,) = cluster.expected([PROMPT], 12)
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == tokens


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=NAME,
        messages=HELLO,
        max_completion_tokens=8,
        temperature=0,
    )
    message = whole.choices[0].message
    assert message.role == "assistant"
    stream: openai.Stream[ChatCompletionChunk] = client.chat.completions.create(
        model=NAME, messages=HELLO, max_completion_tokens=8, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == message.content
    assert len(pieces) > 2


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def sample(seed: int | None) -> str:
        made = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=16, temperature=1.5, seed=seed
        )
        return made.choices[0].text

    assert sample(3) == sample(3)
    assert len({sample(None) for _ in range(3)}) > 1


def test_router_errors_have_the_types_of_the_openai_client(client: openai.OpenAI) -> None:
    def complete(**fields: object) -> object:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 4} | fields
        return client.completions.create(**body)  # type: ignore[call-overload]  # wrong on purpose

    with pytest.raises(openai.NotFoundError) as missing:
        complete(model="gpt")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        complete(prompt="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as long:
        complete(max_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as malformed:
        complete(temperature="hot")
    assert malformed.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        complete(n=2)
    with pytest.raises(openai.BadRequestError):
        complete(extra_body={"kvferry": {"room": 1}})
    with pytest.raises(openai.BadRequestError):
        complete(stream=True, prompt="x" * 3000)
    assert complete()
