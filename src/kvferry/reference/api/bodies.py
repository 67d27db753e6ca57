"""Bodies of requests, and what each asks of the engine. Pure; raises ``ApiError``.

Fields that would change the answer and are not supported are refused. Others
that are not known here are ignored, as clients send many. Beyond OpenAI's own
there are ``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``,
``ignore_eos`` and ``return_token_ids``, which mean what they mean in vLLM, and ``kvferry``, which
says how the prompt's cache travels.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from kvferry import InputError
from kvferry.http.api_errors import ApiError, invalid
from kvferry.reference.engine.requests import MAX_STOPS, EngineRequest, EngineRole
from kvferry.reference.engine.steps import Sampling
from kvferry.reference.models.tokenizer import Tokenizer, TooLong
from kvferry.reference.worker.jobs import Ticket

COMPLETION_TOKENS = 16
CHAT_TOKENS = 256
MAX_TOP_LOGPROBS = 20

Logprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Positive = Annotated[int, Meta(ge=1)]
_AT = re.compile(r" - at `\$\.?([^`.\[]*)[^`]*`$")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has beside its text."""

    include_usage: bool = False


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """What other servers take and what would change the answer, if it were done here."""

    allowed_token_ids: object = None
    bad_words: object = None
    chat_template: object = None
    continue_final_message: object = None
    functions: object = None
    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    logit_bias: object = None
    min_tokens: object = None
    structured_outputs: object = None
    truncate_prompt_tokens: object = None
    use_beam_search: object = None


class Body(Unsupported, frozen=True, kw_only=True):
    """What both kinds of request have in common."""

    model: str
    max_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    kvferry: Ticket | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """``POST /v1/completions``. A prompt is a text or token ids, alone or as a list of one."""

    prompt: str | list[str | int | list[int]]
    logprobs: Logprobs | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message."""

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
    tools: list[object] | None = None
    response_format: Mapping[str, object] | None = None


class Serving(NamedTuple):
    """What is served: the name of the model, its tokenizer, and how long a request may be."""

    model: str
    tokenizer: Tokenizer
    max_tokens: int
    role: EngineRole

    @property
    def most_bytes(self) -> int:
        """A text that has more can't fit, so it is not even cut into tokens."""
        return self.tokenizer.longest_bytes * self.max_tokens


class Ask(NamedTuple):
    """A request as the engine takes it, and how its answer is to be given.

    ``is_local``: the prompt is computed where it might have been received.
    """

    request: EngineRequest
    ticket: Ticket | None
    chat: bool
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool
    is_local: bool


def parse_completion(data: bytes, serving: Serving) -> Ask:
    """A completion's body."""
    body = _decoded(data, _COMPLETIONS)
    _demand_supported(body, serving, {"best_of": body.best_of not in (None, 1)})
    _refuse({"echo": bool(body.echo), "suffix": bool(body.suffix)})
    prompt = _prompt(body.prompt, serving)
    wanted = body.max_tokens or COMPLETION_TOKENS
    return _ask(body, serving, prompt, wanted, body.logprobs)


def parse_chat(data: bytes, serving: Serving) -> Ask:
    """A conversation's body."""
    body = _decoded(data, _CHATS)
    form = (body.response_format or {}).get("type", "text")
    _demand_supported(body, serving, {"tools": bool(body.tools), "response_format": form != "text"})
    if len(body.messages) > serving.max_tokens:
        # Each is a token at the least.
        raise _too_long(serving, "messages", f"there are {len(body.messages)} messages")
    messages = [{"role": m.role, "content": _content(m)} for m in body.messages]
    try:
        text = serving.tokenizer.render(messages, serving.most_bytes)
        prompt = serving.tokenizer.encode(text, special=False)
    except TooLong as error:
        raise _too_long(serving, "messages", str(error)) from None
    except InputError as error:
        raise invalid(str(error), "messages") from None
    wanted = body.max_completion_tokens or body.max_tokens
    if wanted is None:
        wanted = max(1, min(CHAT_TOKENS, serving.max_tokens - len(prompt)))
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _ask(body, serving, prompt, wanted, num_logprobs)


# ---------------------------------------------------------------- the parts


B = TypeVar("B", bound=Body)


# Made here, in one thread: msgspec builds a type's description at its first use, and two threads
# that do so at once crash the process. Bodies are parsed in threads.
_COMPLETIONS = msgspec.json.Decoder(CompletionBody)
_CHATS = msgspec.json.Decoder(ChatBody)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[B]) -> B:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        raise invalid(str(error), found.group(1) or None if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is no JSON that can be read: {error}") from None


def _refuse(given: Mapping[str, bool]) -> None:
    for name, is_given in given.items():
        if is_given:
            raise invalid(f"{name} is not supported here; leave it out", name, "unsupported_value")


def _demand_supported(body: Body, serving: Serving, also: Mapping[str, bool]) -> None:
    if body.model != serving.model:
        raise ApiError(
            404,
            f"The model {body.model!r:.200} does not exist; this server has {serving.model!r}",
            param="model",
            code="model_not_found",
        )
    # What says nothing (false, 0, an empty list) asks for nothing.
    _refuse({name: bool(getattr(body, name)) for name in Unsupported.__struct_fields__})
    _refuse({"n": body.n not in (None, 1)})
    _refuse(also)


def _prompt(given: str | list[str | int | list[int]], serving: Serving) -> list[int]:
    """Token ids, from any of the four forms that OpenAI has."""
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        given = given[0] if isinstance(given[0], str) else [*given[0]]
    if isinstance(given, str):
        num_bytes = len(given.encode(errors="replace"))
        if num_bytes > serving.most_bytes:
            raise _too_long(serving, "prompt", f"the prompt has {num_bytes} bytes")
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
    what = "messages" if isinstance(body, ChatBody) else "prompt"
    role = _role(body.kvferry, serving.role)
    _demand_room(len(prompt), 0 if role is EngineRole.PREFILL else wanted, serving.max_tokens, what)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
    try:
        request = EngineRequest(
            id=f"{kind}-{secrets.token_hex(12)}",
            prompt=tuple(prompt),
            max_tokens=wanted,
            sampling=_sampling(body, num_logprobs),
            stop=tuple(stops),
            stop_tokens=tuple(body.stop_token_ids or ()),
            ignore_end=bool(body.ignore_eos),
            role=role,
        )
    except InputError as error:
        raise invalid(str(error)) from None
    return Ask(
        request=request,
        ticket=body.kvferry if role is not EngineRole.WHOLE else None,
        chat=isinstance(body, ChatBody),
        stream=bool(body.stream) and role is not EngineRole.PREFILL,
        usage=body.stream_options is not None and body.stream_options.include_usage,
        logprobs=num_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        is_local=role is EngineRole.WHOLE and serving.role is not EngineRole.WHOLE,
    )


def _demand_room(num_prompt: int, wanted: int, most: int, param: str) -> None:
    if num_prompt + wanted > most:
        raise invalid(
            f"This model's maximum context length is {most} tokens, and {num_prompt} of the "
            f"{param} with {wanted} of the answer are {num_prompt + wanted}; shorten the {param} "
            f"or lower max_tokens",
            param,
            "context_length_exceeded",
        )


def _too_long(serving: Serving, param: str, what: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {serving.max_tokens} tokens, which are at most "
        f"{serving.most_bytes} bytes, and {what}; shorten the {param}",
        param,
        "context_length_exceeded",
    )


def _role(ticket: Ticket | None, worker: EngineRole) -> EngineRole:
    """Which part of a request a worker computes."""
    if ticket is None:
        return EngineRole.WHOLE
    if worker is EngineRole.WHOLE:
        raise invalid("this worker has no discovery service, so it takes no rooms", "kvferry")
    if worker is EngineRole.DECODE and ticket.prefill is None:
        raise invalid("say which instance prefills as kvferry.prefill", "kvferry")
    return worker


def _sampling(body: Body, num_logprobs: int | None) -> Sampling:
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        # Others write -1 for all.
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=seed,
        logprobs=num_logprobs,
    )
