"""Bodies of requests, parsed into jobs of the engine. Raises ``ApiError``.

Fields that would change the answer and are not supported are refused; other unknown fields
are ignored, as clients send many. Beyond OpenAI's fields there are ``ignore_eos`` and
``return_token_ids`` as in vLLM, ``answered_token_ids``, which the answer continues, and
``kvferry``, which says how the prompt's cache travels.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from kvferry import MAX_NAME, InputError, Room
from kvferry.http.api_errors import ApiError, invalid
from kvferry.reference.engine.requests import EngineRequest, EngineRole, Sampling
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.options import InstanceOptions
from kvferry.reference.worker.service import ServeJob, Ticket

COMPLETION_TOKENS = 16
CHAT_TOKENS = 256
# Fields that are refused, unless they have a value that asks for nothing.
NEUTRAL = {"n": 1, "best_of": 1, "top_k": -1, "repetition_penalty": 1}
UNSUPPORTED = {
    *NEUTRAL,
    *("echo", "suffix", "tools", "functions", "response_format", "logit_bias", "logprobs"),
    *("top_logprobs", "min_p", "min_tokens", "frequency_penalty", "presence_penalty", "bad_words"),
    *("stop_token_ids", "allowed_token_ids", "structured_outputs", "guided_choice"),
    *("guided_grammar", "guided_json", "guided_regex"),
}
_AT = re.compile(r" - at `\$\.?([^`.\[]*)[^`]*`$")

Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class OwnField(msgspec.Struct, frozen=True, kw_only=True):
    """The field ``kvferry``: the room in which the prompt's cache travels, and who may have it.

    ``prefill`` names the source instance; only decode reads it. ``holder`` names an instance from
    which the prompt's prefix is pulled. Without a room this worker computes the whole request.
    """

    room: Room | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=3600)] | None = None
    prefill: Name | None = None
    holder: Name | None = None

    def __post_init__(self) -> None:
        if self.room is None and self.holder is None:
            raise ValueError("give a room, a holder, or both")


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both kinds of request have; null stands for the default."""

    model: str
    max_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    answered_token_ids: list[int] | None = None
    kvferry: OwnField | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """``POST /v1/completions``. A prompt is a text or token ids."""

    prompt: str | list[int]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str = ""


class ChatBody(Body, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None


B = TypeVar("B", bound=Body)


class Serving(NamedTuple):
    """What requests are for: a worker's options, its tokenizer, and its longest request."""

    options: InstanceOptions
    tokenizer: Tokenizer
    max_tokens: int


def parse_completion(data: bytes, serving: Serving) -> ServeJob:
    """Parse the body of a completion."""
    body = _decoded(data, CompletionBody, serving)
    prompt = body.prompt
    tokens = serving.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return _job(body, serving, tokens, body.max_tokens or COMPLETION_TOKENS)


def parse_chat(data: bytes, serving: Serving) -> ServeJob:
    """Parse the body of a conversation."""
    body = _decoded(data, ChatBody, serving)
    try:
        prompt = serving.tokenizer.chat([asdict(message) for message in body.messages])
    except InputError as error:
        raise invalid(str(error), "messages") from None
    default = max(1, min(CHAT_TOKENS, serving.max_tokens - len(prompt)))
    return _job(body, serving, prompt, body.max_completion_tokens or body.max_tokens or default)


def _decoded(data: bytes, kind: type[B], serving: Serving) -> B:
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        raise invalid(str(error), found.group(1) or None if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    model = serving.options.model
    if body.model != model:
        message = f"The model {body.model!r:.200} does not exist; this server has {model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    for name in UNSUPPORTED & fields.keys():
        if fields[name] and fields[name] != NEUTRAL.get(name):
            raise invalid(f"{name} is not supported here; leave it out", name, "unsupported_value")
    return body


def _job(body: Body, serving: Serving, prompt: list[int], max_tokens: int) -> ServeJob:
    options, own, now = serving.options, body.kvferry, time.monotonic()
    is_chat, answered = isinstance(body, ChatBody), body.answered_token_ids or []
    ticket = None
    if own is not None and own.room is not None:
        ticket = Ticket(own.room, own.prefill or "")
    role = EngineRole.WHOLE if ticket is None else EngineRole(str(options.role))
    if ticket is not None and options.discovery is None:
        raise invalid("this worker has no discovery service, so it takes no rooms", "kvferry")
    if ticket is not None and not ticket.prefill and role is EngineRole.DECODE:
        raise invalid("name the prefill instance as kvferry.prefill", "kvferry")
    try:
        request = EngineRequest(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            prompt=(*prompt, *answered),
            answered=len(answered),
            max_tokens=max_tokens - len(answered),
            sampling=Sampling(
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                seed=secrets.randbits(63) if body.seed is None else body.seed,
            ),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            ignore_end=bool(body.ignore_eos),
            role=role,
        )
    except InputError as error:
        raise invalid(str(error)) from None
    if request.reserved_tokens > serving.max_tokens:
        param = "messages" if is_chat else "prompt"
        raise invalid(
            f"This model's maximum context length is {serving.max_tokens} tokens, and the {param} "
            f"with the answer are {request.reserved_tokens}; shorten one of them",
            param,
            "context_length_exceeded",
        )
    wanted_s = (own and own.deadline_s) or options.deadline_s
    return ServeJob(
        request=request,
        # No caller holds the worker's pages for longer than the worker allows.
        transfer_deadline=now + min(wanted_s, options.deadline_s),
        ticket=ticket,
        holder=(own and own.holder) or "",
        is_chat=is_chat,
        streams=bool(body.stream) and role is not EngineRole.PREFILL,
        wants_usage=bool((body.stream_options or {}).get("include_usage")),
        wants_token_ids=bool(body.return_token_ids),
    )
