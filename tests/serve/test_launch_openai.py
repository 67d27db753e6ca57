"""The official client against a whole cluster."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from serve.clusters import NAME, PATIENCE_S, Running, running
from serve.conftest import Models

from kvferry.serve.tiny import Kind

PROMPT = "Once upon a time "
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def cluster(models: Models) -> Iterator[Running]:
    with running(models[Kind.LLAMA], prefill=[{"tp": 3}], decode=[{"page": 32}]) as here:
        yield here


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
        logprobs=True,
        top_logprobs=2,
    )
    message = whole.choices[0].message
    assert message.role == "assistant"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
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


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
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
