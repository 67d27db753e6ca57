"""A client: one question to an endpoint with OpenAI's API, and its answer as it comes.

Whatever a server or the network does ends as a sentence in ``LoadReply.error``; nothing is raised
for it, because one lost answer among many must not end a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from kvferry.errors import InputError
from kvferry.http.sse import EventReader, ServerEvent

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONNECT_S = 30.0
SHOWN = 200
# No honest answer is larger, and a stream without end must not fill the memory.
MAX_BODY_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class LoadReply:
    """What came back for one question; times are seconds after ``began``.

    ``report`` is the ``kvferry`` field: what decode says of its transfer. ``stamps`` has a time
    for every piece that brought text or tokens. ``status`` is HTTP's, 0 where there was none.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    finish: str = ""
    error: str = ""
    began: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    stamps: list[float] = field(default_factory=list)
    status: int = 0

    @property
    def output_tokens(self) -> int:
        """How many tokens came: what the server counted, else the ids, else the pieces."""
        counted = self.usage.get("completion_tokens")
        return counted if isinstance(counted, int) else len(self.tokens) or len(self.stamps)

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the server counted in the question, if it said so."""
        counted = self.usage.get("prompt_tokens")
        return counted if isinstance(counted, int) else None

    def take(self, chunk: Mapping[str, Any], seconds: float) -> None:
        """Add a whole answer, or one event of a stream."""
        if chunk.get("error"):
            self.error = error_in(chunk) or "an error without a reason"
            return
        self.report = chunk.get("kvferry") or self.report
        self.usage = chunk.get("usage") or self.usage
        brought = False
        for choice in chunk.get("choices") or ():
            text, tokens = _text(choice), choice.get("token_ids") or ()
            self.text += text
            self.tokens += tokens
            self.finish = choice.get("finish_reason") or self.finish
            brought = brought or bool(text or tokens)
        if brought:
            self.stamps.append(seconds)
            if self.ttft_s is None:
                self.ttft_s = seconds


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice: of a completion, of a chat's answer, or of a piece of one."""
    holder = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or holder.get("content") or "")


# ---------------------------------------------------------------- sessions


def session_for(url: str, *, api_key: str | None = None, limit: int = 0) -> aiohttp.ClientSession:
    """A session with this endpoint, with or without ``/v1`` at its end. Needs a running loop.

    ``limit`` is the number of connections at once; 0 is no limit.
    """
    base = base_url(url)
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InputError("the API key has characters that no key has; copy it once more")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=limit)
    return aiohttp.ClientSession(base, headers=headers, connector=connector)


def base_url(url: str) -> URL:
    """Where an endpoint's ``v1/`` lies."""
    try:
        parsed = URL(url.strip())
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{url!r:.{SHOWN}} is no address; give one as in http://127.0.0.1:8000/v1")
    path = parsed.path.rstrip("/").removesuffix("/v1")
    return parsed.with_path(f"{path}/")


async def find_model(session: aiohttp.ClientSession) -> str:
    """The first model that the endpoint has; ``InputError`` if nothing answers as it should."""
    try:
        timeout = aiohttp.ClientTimeout(total=CONNECT_S)
        async with session.get("v1/models", timeout=timeout) as response:
            body, status = await _read(response), response.status
    except _Unusable as problem:
        raise InputError(f"no model can be found: {problem}") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = _why(error, CONNECT_S)
        raise InputError(f"no model can be found: {why}; check the address") from None
    document = _decoded(body)
    models = document.get("data") if document else None
    if status != 200 or not isinstance(models, list):
        raise InputError(f"no model can be found: {_refusal(status, body)}; check the address")
    names = [one["id"] for one in models if isinstance(one, dict) and "id" in one]
    if not names:
        raise InputError("the endpoint serves no model; start one, or name it with --model")
    return str(names[0])


# ---------------------------------------------------------------- asking


async def ask(
    session: aiohttp.ClientSession,
    body: Mapping[str, Any],
    *,
    path: str = CHAT,
    deadline_s: float,
    grew: Callable[[LoadReply], None] | None = None,
    into: LoadReply | None = None,
) -> LoadReply:
    """Ask once, streamed or not as the body says, and wait for all of the answer.

    ``grew`` is called after every event. ``deadline_s`` is for everything, connecting included.
    ``into`` is an empty reply to be filled, for callers that have more to say of it.
    """
    reply = into if into is not None else LoadReply()
    reply.began = time.monotonic()
    ended = False
    try:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        async with session.post(path.lstrip("/"), json=body, timeout=timeout) as response:
            reply.status = response.status
            async for chunk in _events(response):
                if chunk is None:
                    ended = True
                    continue
                reply.take(chunk, time.monotonic() - reply.began)
                if grew is not None:
                    grew(reply)
    except _Unusable as problem:
        reply.error = str(problem)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reply.error = reply.error or _why(error, deadline_s)
    reply.total_s = time.monotonic() - reply.began
    if not (reply.error or reply.finish or ended):
        reply.error = "the answer ended before it was complete"
    return reply


class _Unusable(Exception):
    """An answer that says nothing that we can use; the message is for people."""


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """The documents of an answer; None where the server says that this was all."""
    if response.status == 200 and response.content_type == "text/event-stream":
        async for data in _stream(response):
            yield None if data == "[DONE]" else _document(data)
        return
    body = await _read(response)
    if response.status != 200:
        raise _Unusable(_refusal(response.status, body))
    yield _document(body)


async def _stream(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    reader = EventReader(MAX_BODY_BYTES)
    # By what arrives and not by lines: aiohttp refuses lines above 64 KiB.
    async for data in response.content.iter_any():
        for text in _texts(reader.feed(data)):
            yield text
    for text in _texts(reader.end()):
        yield text


def _texts(events: Iterator[ServerEvent]) -> Iterator[str]:
    return (event.data for event in events if event.data is not None)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise _Unusable(f"the answer is above {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def _document(data: str | bytes) -> dict[str, Any]:
    document = _decoded(data)
    if document is None:
        text = data if isinstance(data, str) else data.decode(errors="replace")
        raise _Unusable(f"the answer is not JSON: {text!r:.{SHOWN}}")
    if not _is_shaped(document):
        raise _Unusable(f"the answer is not what OpenAI's API has: {str(document)!r:.{SHOWN}}")
    return document


def _is_shaped(document: dict[str, Any]) -> bool:
    """Whether ``LoadReply.take`` can read it."""
    choices = document.get("choices") or []
    fields = (document.get("usage") or {}, document.get("kvferry") or {})
    return (
        isinstance(choices, list)
        and all(isinstance(one, dict) for one in (*choices, *fields))
        and all(_is_choice(choice) for choice in choices)
    )


def _is_choice(choice: dict[str, Any]) -> bool:
    holders = (choice.get("delta") or {}, choice.get("message") or {})
    tokens = choice.get("token_ids") or []
    return all(isinstance(one, dict) for one in holders) and isinstance(tokens, list)


def _decoded(data: str | bytes) -> dict[str, Any] | None:
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# ---------------------------------------------------------------- reasons


def error_in(document: Mapping[str, Any]) -> str:
    """The sentence of an error document, in any of the forms that servers have; or nothing."""
    error = document.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("code")
    found = error or document.get("message") or document.get("detail")
    return str(found) if found else ""


def _refusal(status: int, body: bytes) -> str:
    document = _decoded(body)
    told = error_in(document) if document else ""
    if told:
        return told
    text = " ".join(body.decode(errors="replace").split())
    return f"HTTP {status}: {text[:SHOWN]}" if text else f"HTTP {status} without a reason"


def _why(error: BaseException, deadline_s: float) -> str:
    """What the network did, as a sentence."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {error.host}:{error.port} ({_os_reason(error)})"
        case TimeoutError():
            return f"no complete answer within {deadline_s:g} s"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "the connection ended before the answer did"
        case _:
            return str(error) or type(error).__name__


def _os_reason(error: OSError) -> str:
    """Without the addresses that are tried in turn, which asyncio puts into its sentence."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
