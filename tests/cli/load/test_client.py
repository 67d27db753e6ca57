"""The client: replies, and errors that become sentences."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web
from cli.load.endpoints import Handler, counted_stream, event, refusal, served, streaming

from kvferry.cli.load.client import LoadReply, ask, base_url, find_model, session_for
from kvferry.errors import InputError

PATIENCE_S = 20.0


def asked(url: str, deadline_s: float = PATIENCE_S, **fields: Any) -> LoadReply:
    async def run() -> LoadReply:
        async with session_for(url) as session:
            return await ask(session, {"stream": True}, deadline_s=deadline_s, **fields)

    return asyncio.run(run())


def reply_to(handler: Handler, **fields: Any) -> LoadReply:
    with served(handler) as url:
        return asked(url, **fields)


# ---------------------------------------------------------------- good answers


def test_a_stream_is_one_reply() -> None:
    chunks = (
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hel"}, "token_ids": [5]}]},
        {"choices": [{"delta": {}, "token_ids": [6]}]},
        {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}, "kvferry": {"a": 1}},
    )
    portions = [event(chunk) for chunk in chunks] + [b"data: [DONE]\n\n"]
    reply = reply_to(streaming(*portions, pause_s=0.02))
    assert (reply.error, reply.status) == ("", 200)
    assert (reply.text, reply.tokens, reply.finish) == ("Hello", [5, 6], "stop")
    assert (reply.prompt_tokens, reply.output_tokens, reply.report) == (3, 9, {"a": 1})
    assert reply.ttft_s == reply.stamps[0] >= 0.02
    assert len(reply.stamps) == 3
    assert reply.stamps == sorted(reply.stamps)
    assert reply.total_s >= reply.stamps[-1] >= 0.06


def test_output_tokens_prefer_the_servers_count() -> None:
    assert LoadReply(stamps=[0.1, 0.2]).output_tokens == 2
    assert LoadReply(stamps=[0.1, 0.2], tokens=[1, 2, 3]).output_tokens == 3
    assert LoadReply(tokens=[1, 2, 3], usage={"completion_tokens": 4}).output_tokens == 4
    assert LoadReply(tokens=[1], usage={"completion_tokens": None}).output_tokens == 1


@pytest.mark.parametrize(
    "choice", [{"text": "hi"}, {"message": {"role": "assistant", "content": "hi"}}]
)
def test_an_unstreamed_answer_is_read(choice: dict[str, Any]) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"choices": [choice | {"finish_reason": "length"}]})

    reply = reply_to(handler)
    assert (reply.error, reply.text, reply.finish) == ("", "hi", "length")
    assert reply.ttft_s is not None


def test_lines_may_be_longer_than_a_packet() -> None:
    text = "x" * 400_000
    long = event({"choices": [{"text": text, "finish_reason": "stop"}]})
    reply = reply_to(streaming(long[:7], long[7:100_000], long[100_000:]))
    assert (reply.error, len(reply.text)) == ("", len(text))


def test_the_path_and_the_key_reach_the_server() -> None:
    async def handler(request: web.Request) -> web.Response:
        told = f"{request.path} {request.headers['Authorization']}"
        return web.json_response({"choices": [{"text": told, "finish_reason": "stop"}]})

    async def run(url: str) -> LoadReply:
        async with session_for(f"{url}/deep/v1/", api_key="k") as session:
            return await ask(session, {}, path="/v1/completions", deadline_s=PATIENCE_S)

    with served(handler) as url:
        assert asyncio.run(run(url)).text == "/deep/v1/completions Bearer k"


# ---------------------------------------------------------------- bad ones


async def gone(request: web.Request) -> web.StreamResponse:
    """Abort the connection in the middle of a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(event({"choices": [{"text": "a"}]}))
    assert request.transport is not None
    request.transport.abort()
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


def answering(text: str, status: int = 200, kind: str = "application/json") -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type=kind)

    return handler


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (answering('{"error": {"message": "too long"}}', 400), "too long"),
        (answering('{"error": "plain"}', 500), "plain"),
        (answering('{"object": "error", "message": "old form"}', 400), "old form"),
        (answering('{"detail": "Not Found"}', 404), "Not Found"),
        (answering("<html>Bad\nGateway</html>", 502, "text/html"), "HTTP 502: <html>Bad Gateway"),
        (answering("", 503), "HTTP 503: no reason"),
        (answering("hello", 200, "text/html"), "the answer is not what OpenAI's API has: 'hello'"),
        (answering("[1]"), "the answer is not what OpenAI's API has: '[1]'"),
        (answering("{}"), "the answer ended before it was complete"),
        (answering('{"choices": 7}'), "the answer is not what OpenAI's API has"),
        (answering('{"choices": [{"delta": 7}]}'), "the answer is not what OpenAI's API has"),
        (answering('{"usage": 7}'), "the answer is not what OpenAI's API has"),
        (answering("[" * 100_000), "the answer is not what OpenAI's API has"),
        (answering('{"error": {}, "x": 1}'), "the answer ended before it was complete"),
        (streaming(b"data: {nonsense\n\n"), "the answer is not what OpenAI's API has: '{nonsense'"),
        (streaming(event({"choices": [{"text": "a"}]})), "ended before it was complete"),
        (streaming(), "the answer ended before it was complete"),
        (streaming(event({"error": {"message": "lost it"}})), "lost it"),
        (gone, "the connection ended before the answer did"),
    ],
)
def test_every_error_is_a_sentence(handler: Handler, sentence: str) -> None:
    reply = reply_to(handler)
    assert reply.error.startswith(sentence) or sentence in reply.error, reply.error
    assert len(reply.error) < 400
    assert reply.total_s > 0


def test_text_before_an_error_is_kept() -> None:
    reply = reply_to(gone)
    assert (reply.text, reply.status) == ("a", 200)


def test_a_silent_server_ends_at_the_deadline() -> None:
    reply = reply_to(silent, deadline_s=0.2)
    assert reply.error == "no complete answer within 0.2 s"
    assert 0.2 <= reply.total_s < 10


def test_a_closed_port() -> None:
    reply = asked(f"http://127.0.0.1:{free_port()}")
    assert reply.error.startswith("cannot connect to 127.0.0.1:")
    assert reply.error.endswith("(Connection refused)")
    assert reply.status == 0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# ---------------------------------------------------------------- addresses and models


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/"),
        ("http://h:1/v1", "http://h:1/"),
        (" https://h/api/v1/ ", "https://h/api/"),
        ("http://[::1]:8000/", "http://[::1]:8000/"),
    ],
)
def test_addresses_with_and_without_a_version(url: str, base: str) -> None:
    assert str(base_url(url)) == base


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h", "http://", "http://h:x", "h"])
def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"is no address; give one as in http://"):
        base_url(url)


def test_a_malformed_key_is_a_sentence() -> None:
    async def run(url: str) -> LoadReply:
        async with session_for(url, api_key="a\nb") as session:
            return await ask(session, {}, deadline_s=PATIENCE_S)

    with served(streaming(*counted_stream(1, 1))) as url:
        assert "header" in asyncio.run(run(url)).error


def found_at(url: str) -> str:
    async def run() -> str:
        async with session_for(url) as session:
            return await find_model(session)

    return asyncio.run(run())


def test_the_first_model_is_found() -> None:
    with served(streaming(*counted_stream(1, 1))) as url:
        assert found_at(f"{url}/v1") == "m"


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ('{"data": []}', 200, "serves no model"),
        ("<html>", 200, "'<html>' is no list of models; check the address"),
        ('{"error": {"message": "wrong key"}}', 401, "wrong key"),
        ('{"data": 3}', 200, "no model can be found"),
    ],
)
def test_an_endpoint_without_models_is_one_sentence(body: str, status: int, sentence: str) -> None:
    async def post(_: web.Request) -> web.Response:
        return refusal("not asked")

    with (
        served(post, answering(body, status)) as url,
        pytest.raises(InputError, match=sentence),
    ):
        found_at(url)


def test_an_unreachable_endpoint_is_one_sentence() -> None:
    with pytest.raises(InputError, match="no model can be found: cannot connect to"):
        found_at(f"http://127.0.0.1:{free_port()}")
