"""Bodies of requests, parsed into what each asks of the engine. Raises ``ApiError``.

Fields that would change the answer and are not supported are refused; other unknown fields
are ignored, as clients send many. Beyond OpenAI's fields there are ``ignore_eos`` and
``return_token_ids`` as in vLLM, and ``kvferry``, which says how the prompt's cache travels.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from kvferry import InputError
from kvferry.http.api_errors import ApiError, invalid
from kvferry.reference.engine.requests import EngineRequest, EngineRole, Sampling
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.worker.jobs import Ask, Ticket

COMPLETION_TOKENS = 16
CHAT_TOKENS = 256
MAX_TOP_LOGPROBS = 20
# Fields that are refused, unless they have a value that asks for nothing.
UNSUPPORTED: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "top_k": -1,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    **dict.fromkeys(("echo", "suffix", "tools", "functions", "logit_bias", "min_p", "min_tokens")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "stop_token_ids", "bad_words")),
    **dict.fromkeys(("allowed_token_ids", "guided_choice", "guided_grammar", "guided_json")),
    **dict.fromkeys(("guided_regex", "structured_outputs", "chat_template", "use_beam_search")),
    **dict.fromkeys(("continue_final_message", "truncate_prompt_tokens")),
}
_AT = re.compile(r" - at `\$\.?([^`.\[]*)[^`]*`$")

Logprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Extra contents of a stream."""

    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both kinds of request have."""

    model: str
    max_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    kvferry: Ticket | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """``POST /v1/completions``. A prompt is a text or token ids, alone or in a list of one."""

    prompt: str | list[str | int | list[int]]
    logprobs: Logprobs | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None


class Serving(NamedTuple):
    """What a worker serves: the model's name, the longest request, its part, and deadlines."""

    model: str
    tokenizer: Tokenizer
    max_tokens: int
    role: EngineRole
    deadline_s: float
    request_s: float


def parse_completion(data: bytes, serving: Serving) -> Ask:
    """Parse the body of a completion."""
    body = _decoded(data, CompletionBody, serving)
    prompt = _prompt(body.prompt, serving)
    return _ask(body, serving, prompt, body.max_tokens or COMPLETION_TOKENS, body.logprobs)


def parse_chat(data: bytes, serving: Serving) -> Ask:
    """Parse the body of a conversation."""
    body = _decoded(data, ChatBody, serving)
    messages = [{"role": m.role, "content": _content(m)} for m in body.messages]
    try:
        prompt = serving.tokenizer.chat(messages)
    except InputError as error:
        raise invalid(str(error), "messages") from None
    wanted = body.max_completion_tokens or body.max_tokens
    if wanted is None:
        wanted = max(1, min(CHAT_TOKENS, serving.max_tokens - len(prompt)))
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _ask(body, serving, prompt, wanted, num_logprobs)


B = TypeVar("B", bound=Body)


def _decoded(data: bytes, kind: type[B], serving: Serving) -> B:
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        raise invalid(str(error), found.group(1) or None if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if body.model != serving.model:
        raise ApiError(
            404,
            f"The model {body.model!r:.200} does not exist; this server has {serving.model!r}",
            param="model",
            code="model_not_found",
        )
    for name in UNSUPPORTED.keys() & fields.keys():
        if fields[name] and fields[name] != UNSUPPORTED[name]:
            raise invalid(f"{name} is not supported here; leave it out", name, "unsupported_value")
    return body


def _prompt(given: str | list[str | int | list[int]], serving: Serving) -> list[int]:
    """Return token ids from any of the four forms of OpenAI."""
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        given = given[0] if isinstance(given[0], str) else [*given[0]]
    if isinstance(given, str):
        return serving.tokenizer.encode(given)
    tokens = [token for token in given if isinstance(token, int)]
    if len(tokens) != len(given):
        raise invalid("give one prompt at a time: a text, or a list of token ids", "prompt")
    return tokens


def _content(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" for part in message.content):
        raise invalid("this model reads text only; send parts of type text", "messages")
    return "".join(part.text for part in message.content)


def _ask(
    body: Body, serving: Serving, prompt: list[int], wanted: int, num_logprobs: int | None
) -> Ask:
    chat = isinstance(body, ChatBody)
    role = _role(body.kvferry, serving.role)
    reserved = 0 if role is EngineRole.PREFILL else wanted
    num_tokens, param = len(prompt), "messages" if chat else "prompt"
    if num_tokens + reserved > serving.max_tokens:
        raise invalid(
            f"This model's maximum context length is {serving.max_tokens} tokens, and "
            f"{num_tokens} of the {param} with {reserved} of the answer are "
            f"{num_tokens + reserved}; shorten the {param} or lower max_tokens",
            param,
            "context_length_exceeded",
        )
    try:
        sampling = Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            logprobs=num_logprobs,
        )
        request = EngineRequest(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            prompt=tuple(prompt),
            max_tokens=wanted,
            sampling=sampling,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            ignore_end=bool(body.ignore_eos),
            role=role,
        )
    except InputError as error:
        raise invalid(str(error)) from None
    return Ask(
        request=request,
        ticket=body.kvferry if role is not EngineRole.WHOLE else None,
        chat=chat,
        stream=bool(body.stream) and role is not EngineRole.PREFILL,
        usage=body.stream_options is not None and body.stream_options.include_usage,
        logprobs=num_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        is_local=role is EngineRole.WHOLE and serving.role is not EngineRole.WHOLE,
    )


def _role(ticket: Ticket | None, worker: EngineRole) -> EngineRole:
    """Return which part of a request this worker computes."""
    if ticket is None:
        return EngineRole.WHOLE
    if worker is EngineRole.WHOLE:
        raise invalid("this worker has no discovery service, so it takes no rooms", "kvferry")
    if worker is EngineRole.DECODE and ticket.prefill is None:
        raise invalid("name the prefill instance as kvferry.prefill", "kvferry")
    return worker
