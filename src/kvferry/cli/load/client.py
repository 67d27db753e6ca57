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
MAX_EVENT_BYTES = 64 << 20


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

    @property
    def error_text(self) -> str:
        """The sentence of an error document, in any of the forms that servers use."""
        error = self.error
        if isinstance(error, dict):
            error = error.get("message") or error.get("code")
        return str(error or self.message or self.detail or "")


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
    total_s: float = 0.0
    stamps: list[float] = field(default_factory=list)
    status: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first text or token; None without any."""
        return self.stamps[0] if self.stamps else None

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

    def _add(self, document: _ReplyDocument) -> None:
        if document.error:
            raise _UnusableReply(document.error_text or "an error without a reason")
        self.report = document.kvferry or self.report
        self.usage = document.usage or self.usage
        before = len(self.text) + len(self.tokens)
        for choice in document.choices or ():
            content = choice.delta or choice.message or _Text()
            self.text += choice.text or content.content or ""
            self.tokens += choice.token_ids or []
            self.finish = choice.finish_reason or self.finish
        if len(self.text) + len(self.tokens) > before:
            self.stamps.append(time.monotonic() - self.began)


class _UnusableReply(Exception):
    """A reply that cannot be used; the message is for people."""


def session_for(url: str, *, api_key: str | None = None) -> aiohttp.ClientSession:
    """Return a session with this endpoint, with or without ``/v1``. Needs a running loop."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Load needs more connections than aiohttp's limit of 100.
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(base_url(url), headers=headers, connector=connector)


def base_url(url: str) -> URL:
    """Return the address below which an endpoint's ``v1/`` is."""
    try:
        parsed = URL(url.strip())
        usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{url!r:.{SHOWN}} is no address; give one as in http://127.0.0.1:8000/v1")
    return parsed.with_path(f"{parsed.path.rstrip('/').removesuffix('/v1')}/")


async def find_model(session: aiohttp.ClientSession) -> str:
    """Return the endpoint's first model. Raises ``InputError`` if it lists none."""
    try:
        timeout = aiohttp.ClientTimeout(total=CONNECT_S)
        async with session.get("v1/models", timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                raise _UnusableReply(_refusal(response.status, body))
        names = [str(one["id"]) for one in msgspec.json.decode(body)["data"]]
    except (_UnusableReply, aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = _reason(error, CONNECT_S)
        raise InputError(f"no model can be found: {reason}; check the address") from None
    except (ValueError, LookupError, TypeError):
        raise InputError(
            f"no model can be found: {body!r:.{SHOWN}} is no list of models; check the address"
        ) from None
    if not names:
        raise InputError("the endpoint serves no model; start one, or name it with --model")
    return names[0]


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
    timeout, is_complete = aiohttp.ClientTimeout(total=deadline_s), False
    try:
        async with session.post(path.lstrip("/"), json=body, timeout=timeout) as response:
            reply.status = response.status
            async for text in _documents(response):
                is_complete = text == "[DONE]"
                if not is_complete:
                    reply._add(_decode(text))
        if not (reply.finish or is_complete):
            reply.error = "the answer ended before it was complete"
    except (_UnusableReply, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        reply.error = _reason(error, deadline_s)
    reply.total_s = time.monotonic() - reply.began
    return reply


async def _documents(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the documents of a reply. Raise ``_UnusableReply`` for an error status."""
    if response.status == 200 and response.content_type == "text/event-stream":
        reader = EventReader(MAX_EVENT_BYTES)
        # Not by lines: aiohttp refuses lines above 64 KiB.
        async for data in response.content.iter_any():
            for event in reader.feed(data):
                if event.data is not None:
                    yield event.data
        for event in reader.end():
            if event.data is not None:
                yield event.data
        return
    body = await response.read()
    if response.status != 200:
        raise _UnusableReply(_refusal(response.status, body))
    yield body.decode(errors="replace")


def _decode(text: str) -> _ReplyDocument:
    try:
        return msgspec.json.decode(text, type=_ReplyDocument)
    except (ValueError, RecursionError):
        shown = f"the answer is not what OpenAI's API has: {text!r:.{SHOWN}}"
        raise _UnusableReply(shown) from None


def _refusal(status: int, body: bytes) -> str:
    """Return the reason in the body of an error response."""
    text = " ".join(body.decode(errors="replace").split())
    try:
        sentence = _decode(text).error_text
    except _UnusableReply:
        sentence = ""
    return sentence or f"HTTP {status}: {text[:SHOWN] or 'no reason'}"


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
