"""The HTTP API of a worker, by the official client and by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
from documented import BLOCKS
from reference.driving import PROMPTS, ask, engine_of
from reference.working import (
    MODEL,
    PATIENCE_S,
    Caller,
    Reply,
    Worker,
    body_of,
    call,
    events,
    hosted,
)
from reference.working import options_for as options_of

from kvferry.layout.layout import Parallel
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.models.tiny import TinyKind

Models = dict[TinyKind, Path]

SERVING = "docs/serving.md", "python"
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def worker(models: Models) -> Iterator[Worker]:
    """Alone, without a discovery service."""
    with hosted(options_of("decode", models[TinyKind.LLAMA], None, Parallel())) as (running,):
        yield running


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[openai.OpenAI]:
    url = f"{worker.url}/v1"
    with openai.OpenAI(base_url=url, api_key="-", timeout=PATIENCE_S, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Engine]:
    with engine_of(models[TinyKind.LLAMA]) as made:
        yield made


# ---------------------------------------------------------------- the official client


def test_the_client_finds_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_completion_whole_and_streamed(client: openai.OpenAI, engine: Engine) -> None:
    fields: Any = {"model": MODEL, "prompt": "Once upon", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**fields)
    parts = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    prompt = engine.tokenizer.encode("Once upon")
    (alone,) = ask(engine, [EngineRequest(id="r", prompt=tuple(prompt), max_tokens=20)])
    assert whole.choices[0].text == alone.text
    assert whole.choices[0].finish_reason == str(alone.finish)
    assert "".join(part.choices[0].text for part in parts[:-1]) == alone.text
    assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == str(alone.finish)
    assert parts[-1].choices == []
    for usage in (whole.usage, parts[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (9, len(alone.tokens))
        assert usage.total_tokens == 9 + len(alone.tokens)
    assert {part.usage for part in parts[:-1]} == {None}
    assert {part.object for part in parts} == {"text_completion"}


def test_a_chat_whole_and_streamed(client: openai.OpenAI, engine: Engine) -> None:
    fields: Any = {"model": MODEL, "messages": HELLO, "temperature": 0}
    whole = client.chat.completions.create(**fields, max_completion_tokens=20)
    parts = list(client.chat.completions.create(**fields, max_tokens=20, stream=True))
    prompt = engine.tokenizer.chat(HELLO)
    (alone,) = ask(engine, [EngineRequest(id="r", prompt=tuple(prompt), max_tokens=20)])
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == alone.text
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == alone.text
    assert parts[-1].choices[0].finish_reason == str(alone.finish)
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert len({part.id for part in parts}) == 1


def test_the_serving_pages_example_runs(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [one.text for one in BLOCKS if (one.page, one.language) == SERVING]
    for shown, here in (("http://127.0.0.1:8000", worker.url), ("SmolLM2-135M-Instruct", MODEL)):
        assert code.count(shown) == 1
        code = code.replace(shown, here)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    namespace["client"].close()
    assert capsys.readouterr().out


def test_chat_has_a_length_of_its_own(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(messages=HELLO, **fields)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 256
    assert whole.choices[0].finish_reason == "length"


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI) -> None:
    def drawn(seed: int | None) -> str:
        return (
            client.completions.create(
                model=MODEL, prompt="Dice:", max_tokens=24, temperature=1.5, seed=seed
            )
            .choices[0]
            .text
        )

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)


def test_values_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    neutral: Any = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    fields: Any = {"model": MODEL, "prompt": "Dice:", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**fields).choices[0].text
    same = client.completions.create(**fields, n=1, extra_body=neutral).choices[0].text
    assert same == plain


def test_stop_strings(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": "Once upon", "max_tokens": 20, "temperature": 0}
    text = client.completions.create(**fields).choices[0].text
    stop = text[3:5]
    for given in (stop, [stop, "never"]):
        (choice,) = client.completions.create(**fields, stop=given).choices
        assert choice.text == text[: text.index(stop)]
        assert choice.finish_reason == "stop"


def test_errors_have_the_types_of_the_openai_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 3000}]
        )
    assert long.value.code == "context_length_exceeded"
    assert long.value.param == "messages"
    assert long.value.type == "invalid_request_error"


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", b"{", None, "not valid JSON"),
        ("completions", b"\xff", None, "not valid JSON"),
        ("completions", b'{"metadata":' + b"[" * 100_000, None, "not valid JSON"),
        ("completions", b"[]", None, "Expected `object`"),
        ("completions", {}, None, "model"),
        ("completions", {"model": MODEL}, None, "prompt"),
        ("completions", {"prompt": ""}, None, "no tokens"),
        ("completions", {"prompt": []}, None, "no tokens"),
        ("completions", {"prompt": ["a", "b"]}, "prompt", "Expected `int`"),
        ("completions", {"prompt": [[1], [2]]}, "prompt", "Expected `int`"),
        ("completions", {"prompt": [1, 999]}, None, "outside 0..256"),
        ("completions", {"prompt": [-1]}, None, "outside 0..256"),
        ("completions", {"prompt": 7}, "prompt", "Expected"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", ">= 1"),
        ("completions", {"prompt": "x", "max_tokens": "9"}, "max_tokens", "Expected"),
        ("completions", {"prompt": "x", "max_tokens": 9999}, "prompt", "maximum context length"),
        ("completions", {"prompt": "x", "temperature": -1}, None, "temperature"),
        ("completions", {"prompt": "x", "top_p": 1.5}, None, "top_p"),
        ("completions", {"prompt": "x", "guided_json": {"a": 1}}, "guided_json", "not supported"),
        ("completions", {"prompt": "x", "min_tokens": 3}, "min_tokens", "not supported"),
        ("completions", {"prompt": "x", "n": 2}, "n", "not supported"),
        ("completions", {"prompt": "x", "top_k": 3}, "top_k", "not supported"),
        ("completions", {"prompt": "x", "min_p": 0.1}, "min_p", "not supported"),
        ("completions", {"prompt": "x", "stop_token_ids": [3]}, "stop_token_ids", "not supported"),
        (
            "completions",
            {"prompt": "x", "repetition_penalty": 2},
            "repetition_penalty",
            "not supported",
        ),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of", "not supported"),
        ("completions", {"prompt": "x", "echo": True}, "echo", "not supported"),
        ("completions", {"prompt": "x", "seed": 1 << 64}, None, "64-bit"),
        ("completions", {"prompt": "x", "stop": [""]}, None, "stop"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, None, "stop"),
        ("completions", {"prompt": "x", "logprobs": 1}, "logprobs", "not supported"),
        ("completions", {"prompt": "x", "logit_bias": {"1": 1}}, "logit_bias", "not supported"),
        ("completions", {"prompt": "x", "kvferry": {"room": 1}}, "kvferry", "no discovery service"),
        ("completions", {"prompt": "x", "kvferry": {"room": -1}}, "kvferry", ">= 0"),
        ("completions", {"prompt": "x", "kvferry": {}}, "kvferry", "room"),
        ("chat/completions", {"messages": []}, "messages", "length >= 1"),
        ("chat/completions", {"messages": "hi"}, "messages", "Expected"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "messages", "role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "Expected `str`",
        ),
        ("chat/completions", {"messages": HELLO, "tools": [{}]}, "tools", "not supported"),
    ],
)
def test_a_bad_request_is_refused_with_its_field(
    worker: Worker, path: str, body: Any, param: str | None, words: str
) -> None:
    if isinstance(body, dict) and ("prompt" in body or "messages" in body):
        body = {"model": MODEL} | body

    async def talk(caller: Caller) -> Reply:
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with caller.session.post(f"{worker.url}/v1/{path}", **content) as response:
            return Reply(response.status, await response.json())

    reply = call(talk)
    assert reply.status == 400, reply
    error = reply.document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert words in error["message"]


def test_unknown_paths_and_large_bodies_are_refused(worker: Worker) -> None:
    async def talk(caller: Caller) -> list[tuple[int, dict[str, Any]]]:
        seen = []
        for method, path, data in (
            ("GET", "/v1/nothing", None),
            ("GET", "/v1/completions", None),
            ("POST", "/v1/completions", BytesIO(b"x" * ((1 << 20) + 1000))),
        ):
            async with caller.session.request(method, worker.url + path, data=data) as response:
                seen.append((response.status, (await response.json())["error"]))
        return seen

    seen = call(talk)
    assert [status for status, _ in seen] == [404, 405, 413]
    assert "POST" in seen[1][1]["message"]


def test_a_stream_is_events_and_ends_as_such(worker: Worker) -> None:
    async def talk(caller: Caller) -> tuple[list[dict[str, Any]], Reply]:
        body = body_of(PROMPTS[1], max_tokens=5)
        async with caller.session.post(
            f"{worker.url}/v1/completions", json=body | {"stream": True}
        ) as response:
            assert response.content_type == "text/event-stream"
            streamed = events(await response.read())
        return streamed, await caller.post(worker.url, body)

    streamed, whole = call(talk)
    # Token ids were asked for, so every token has an event.
    assert [token for part in streamed for token in part["choices"][0]["token_ids"]] == whole.tokens
    assert len(streamed) == 5
    assert "kvferry" not in streamed[-1]


def test_a_prompt_is_text_or_token_ids(worker: Worker) -> None:
    async def talk(caller: Caller) -> list[list[int]]:
        replies = [
            await caller.post(worker.url, body_of(()) | {"prompt": form})
            for form in ("Hello", list(b"Hello"))
        ]
        return [reply.tokens for reply in replies]

    text, ids = call(talk)
    assert text == ids


def test_usage_counts_the_cached_tokens(worker: Worker) -> None:
    async def talk(caller: Caller) -> list[int]:
        prompt = tuple(range(100, 140))
        replies = [await caller.post(worker.url, body_of(prompt, 2)) for _ in range(2)]
        usages = [reply.document["usage"] for reply in replies]
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]

    assert call(talk) == [0, 32]


def test_healthz_and_metrics(worker: Worker, models: Models) -> None:
    async def talk(caller: Caller) -> tuple[dict[str, Any], str]:
        await caller.post(worker.url, body_of(PROMPTS[1]))
        told = await caller.idle(worker.url)
        async with caller.session.get(f"{worker.url}/metrics") as response:
            return told, await response.text()

    told, text = call(talk)
    assert told["status"] == "ok"
    assert (told["role"], told["name"], told["model"]) == ("decode", worker.name, MODEL)
    assert told["free_tokens"] == 2048
    assert "kvferry_http_connections" in text


def test_requests_of_callers_that_leave_are_freed(worker: Worker) -> None:
    async def talk(caller: Caller) -> dict[str, Any]:
        tasks = [
            asyncio.create_task(caller.post(worker.url, body_of(PROMPTS[2], max_tokens=300)))
            for _ in range(6)
        ]
        await caller.until(worker.url, lambda told: told["running"] + told["waiting"] == 6)
        for task in tasks:
            task.cancel()
        return await caller.idle(worker.url)

    assert call(talk)["free_tokens"] == 2048


def test_a_worker_that_has_ended_reports_503(models: Models) -> None:
    with hosted(options_of("decode", models[TinyKind.LLAMA], None, Parallel())) as (worker,):
        worker.end()

        async def talk(caller: Caller) -> tuple[int, Reply]:
            async with caller.session.get(f"{worker.url}/healthz") as response:
                return response.status, await caller.post(worker.url, body_of(PROMPTS[1]))

        status, reply = call(talk)
    assert status == 503
    assert (reply.status, reply.document["error"]["code"]) == (503, "worker_ended")
