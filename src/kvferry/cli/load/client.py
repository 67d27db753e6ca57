"""A client of OpenAI's API: one request and its reply, as a stream or whole.

Errors of the server and of the network become a sentence in ``LoadReply.error``. Nothing is
raised for them, because one lost reply must not end a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from kvferry.errors import InputError
from kvferry.http.sse import EventReader

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONNECT_S = 30.0
SHOWN = 200
# A stream without end must not fill the memory.
MAX_BODY_BYTES = 64 << 20


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _ReplyDocument(msgspec.Struct):
    """A completion, a chat completion, an event of either, or an error in any known form."""

    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    kvferry: dict[str, Any] | None = None
    error: Any = None
    message: Any = None
    detail: Any = None


@dataclass(slots=True, kw_only=True)
class LoadReply:
    """The reply to one request; times are seconds after ``began``.

    ``report`` is the ``kvferry`` field, decode's report of the transfer. ``stamps`` has the time
    of every event with text or tokens. ``status`` is HTTP's, 0 without a response.
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
        """The number of tokens: as the server counted, else token ids, else events."""
        counted = self.usage.get("completion_tokens")
        return counted if isinstance(counted, int) else len(self.tokens) or len(self.stamps)

    @property
    def prompt_tokens(self) -> int | None:
        """The number of prompt tokens that the server counted, if it said so."""
        counted = self.usage.get("prompt_tokens")
        return counted if isinstance(counted, int) else None

    def _add(self, document: _ReplyDocument, seconds: float) -> None:
        if document.error:
            self.error = _error_in(document) or "an error without a reason"
            return
        self.report = document.kvferry or self.report
        self.usage = document.usage or self.usage
        has_output = False
        for choice in document.choices or ():
            content = choice.delta or choice.message or _Text()
            text, tokens = choice.text or content.content or "", choice.token_ids or []
            self.text += text
            self.tokens += tokens
            self.finish = choice.finish_reason or self.finish
            has_output = has_output or bool(text or tokens)
        if has_output:
            self.stamps.append(seconds)
            self.ttft_s = seconds if self.ttft_s is None else self.ttft_s


# ---------------------------------------------------------------- sessions


def session_for(url: str, *, api_key: str | None = None) -> aiohttp.ClientSession:
    """Return a session with this endpoint, with or without ``/v1``. Needs a running loop."""
    base = base_url(url)
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InputError(
            "--api-key or OPENAI_API_KEY has characters that no key has, such as the end of a "
            "line; copy the key once more"
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Load needs more connections than aiohttp's limit of 100.
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(base, headers=headers, connector=connector)


def base_url(url: str) -> URL:
    """Return the address below which an endpoint's ``v1/`` is."""
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
    """Return the endpoint's first model. Raises ``InputError`` if it lists none."""
    try:
        timeout = aiohttp.ClientTimeout(total=CONNECT_S)
        async with session.get("v1/models", timeout=timeout) as response:
            body, status = await _read(response), response.status
        models: Any = msgspec.json.decode(body)["data"] if status == 200 else None
        names = [one["id"] for one in models]
    except (_UnusableReply, aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = _reason(error, CONNECT_S)
        raise InputError(f"no model can be found: {reason}; check the address") from None
    except (msgspec.DecodeError, UnicodeError, LookupError, TypeError):
        reason = _refusal(status, body)
        raise InputError(f"no model can be found: {reason}; check the address") from None
    if not names:
        raise InputError("the endpoint serves no model; start one, or name it with --model")
    return str(names[0])


# ---------------------------------------------------------------- requests


async def ask(
    session: aiohttp.ClientSession,
    body: Mapping[str, Any],
    *,
    path: str = CHAT,
    deadline_s: float,
    into: LoadReply | None = None,
) -> LoadReply:
    """Send one request and wait for its whole reply.

    ``deadline_s`` includes connecting. ``into`` is an empty reply to fill, for callers with a
    subclass.
    """
    reply = into if into is not None else LoadReply()
    reply.began = time.monotonic()
    ended = False
    try:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        async with session.post(path.lstrip("/"), json=body, timeout=timeout) as response:
            reply.status = response.status
            async for document in _documents(response):
                if document is None:
                    ended = True
                    continue
                reply._add(document, time.monotonic() - reply.began)
    except (_UnusableReply, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reply.error = reply.error or _reason(error, deadline_s)
    reply.total_s = time.monotonic() - reply.began
    if not (reply.error or reply.finish or ended):
        reply.error = "the answer ended before it was complete"
    return reply


class _UnusableReply(Exception):
    """A reply that cannot be used; the message is for people."""


async def _documents(response: aiohttp.ClientResponse) -> AsyncIterator[_ReplyDocument | None]:
    """Yield the documents of a reply, and None for the server's end mark."""
    if response.status == 200 and response.content_type == "text/event-stream":
        reader = EventReader(MAX_BODY_BYTES)
        # Not by lines: aiohttp refuses lines above 64 KiB.
        async for data in response.content.iter_any():
            for event in reader.feed(data):
                if event.data is not None:
                    yield _decode(event.data)
        for event in reader.end():
            if event.data is not None:
                yield _decode(event.data)
        return
    body = await _read(response)
    if response.status != 200:
        raise _UnusableReply(_refusal(response.status, body))
    yield _decode(body.decode(errors="replace"))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise _UnusableReply(f"the answer is above {MAX_BODY_BYTES >> 20} MiB")
    return bytes(body)


def _decode(text: str) -> _ReplyDocument | None:
    if text == "[DONE]":
        return None
    try:
        return msgspec.json.decode(text, type=_ReplyDocument)
    except msgspec.ValidationError:
        if text.lstrip().startswith("{"):
            shown = f"the answer is not what OpenAI's API has: {text!r:.{SHOWN}}"
            raise _UnusableReply(shown) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    raise _UnusableReply(f"the answer is not JSON: {text!r:.{SHOWN}}")


# ---------------------------------------------------------------- reasons


def _error_in(document: _ReplyDocument) -> str:
    """Return the sentence of an error document, in any of the forms that servers use."""
    error = document.error
    if isinstance(error, dict):
        error = error.get("message") or error.get("code")
    found = error or document.message or document.detail
    return str(found) if found else ""


def _refusal(status: int, body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    try:
        sentence = _error_in(msgspec.json.decode(body, type=_ReplyDocument))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        sentence = ""
    return sentence or (
        f"HTTP {status}: {text[:SHOWN]}" if text else f"HTTP {status} without a reason"
    )


def _reason(error: BaseException, deadline_s: float) -> str:
    """Return an error of the network or the reply as a sentence."""
    match error:
        case aiohttp.ClientConnectorError():
            # asyncio's own sentence lists every address that it tried.
            known = error.errno is not None and error.errno > 0
            reason = os.strerror(error.errno or 0) if known else error.strerror or str(error)
            return f"cannot connect to {error.host}:{error.port} ({reason})"
        case TimeoutError():
            return f"no complete answer within {deadline_s:g} s"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "the connection ended before the answer did"
        case _:
            return str(error) or type(error).__name__
