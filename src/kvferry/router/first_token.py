"""The first token from prefill: which streams may begin with it, and how decode continues. Pure.

A prefill worker samples the first token anyway. The router streams it at once and asks decode for
the rest, with a prompt of token ids that ends in that token. The answer stays the one of a single
engine, so this is done only if every field of the request is known to mean the same for a
continued prompt. A seeded request is not continued: vLLM's generator would begin anew. A first
token whose text is incomplete or empty is not either: its characters depend on later tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvferry.http.sse import ServerEvent
from kvferry.router.bodies import ApiCall

COMPLETIONS = "/v1/completions"
CHAT_CHUNK = "chat.completion.chunk"
# The ids of the prompt and of the first token.
TokenIds = tuple[list[int], list[int]]
# Fields that a continuation passes on, or that this module adapts.
CONTINUED = frozenset(
    {
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream"),
        *("stream_options", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "user"),
        *("logit_bias", "ignore_eos", "n", "cache_salt", "priority", "return_token_ids"),
        "kv_transfer_params",
    }
)
PLAIN = {"role", "content", "name"}
# Only the prompt needs these, and a continuation has its token ids.
OF_PROMPT = ("messages", "max_completion_tokens")
REPLACED = "\N{REPLACEMENT CHARACTER}"


class FirstChoice(msgspec.Struct, frozen=True):
    """Fields of a vLLM choice that the router reads."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    text: str | None = None
    message: dict[str, Any] | None = None


class PrefillAnswer(msgspec.Struct, frozen=True):
    """Fields of vLLM's answer to prefill that the router reads."""

    id: str
    created: int
    model: str
    choices: list[FirstChoice]
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Continuation(NamedTuple):
    """The rest of a stream after its first token.

    ``call`` asks a worker for it, and ``num_prompt_tokens`` of its prompt come from the room.
    ``head`` are the stream's first events.
    """

    call: ApiCall
    num_prompt_tokens: int
    head: bytes
    answer: PrefillAnswer
    is_chat: bool

    def rewrite(self, event: ServerEvent) -> bytes:
        """Return an event of the continuation as part of the client's stream."""
        if event.data is None or not event.data.startswith("{"):
            return event.raw
        chunk = msgspec.json.decode(event.data, type=dict[str, Any])
        if "choices" not in chunk:
            return event.raw
        if usage := chunk.get("usage"):
            chunk["usage"] = usage | {
                "prompt_tokens": usage["prompt_tokens"] - 1,
                "completion_tokens": usage["completion_tokens"] + 1,
            }
        chunk |= {"id": self.answer.id, "created": self.answer.created}
        for choice in chunk["choices"]:
            # The client has its prompt's ids; these end in the first token.
            choice.pop("prompt_token_ids", None)
        if self.is_chat:
            chunk["object"] = CHAT_CHUNK
            chunk["choices"] = [_chat_choice(choice) for choice in chunk["choices"]]
        return _event(chunk)


def may_continue(call: ApiCall) -> bool:
    """Return whether the rest of the answer may be asked for with a prompt of token ids."""
    body = {key: value for key, value in call.body.items() if value is not None}
    limit, options = _limit(body), body.get("stream_options", {})
    messages = body.get("messages", [])
    return (
        call.stream
        and body.get("n", 1) == 1
        and body.keys() <= CONTINUED
        and isinstance(options, dict)
        and options.keys() <= {"include_usage"}
        and isinstance(limit, int)
        and limit > 1
        and isinstance(messages, list)
        and all(isinstance(one, dict) and one.keys() <= PLAIN for one in messages)
        and all(isinstance(one.get("content"), str) for one in messages)
    )


def continuation(call: ApiCall, document: bytes, room: int) -> Continuation | None:
    """Return how to continue after prefill's answer; None if decode must begin at the start."""
    try:
        answer = msgspec.json.decode(document, type=PrefillAnswer)
        (choice,) = answer.choices
    except ValueError:
        return None
    prompt = answer.prompt_token_ids or choice.prompt_token_ids or []
    text = choice.text if choice.message is None else _plain_text(choice.message)
    own = (answer.kv_transfer_params or {}).get("kvferry") or {}
    # A prefill that leaves the prompt's last token to decode has sampled too early.
    is_after_prompt = (own.get("room"), own.get("tokens")) == (room, len(prompt))
    if (
        not is_after_prompt
        or choice.finish_reason != "length"
        or not text
        or REPLACED in text
        or choice.token_ids is None
        or len(choice.token_ids) != 1
    ):
        return None
    is_chat = choice.message is not None
    body = {key: value for key, value in call.body.items() if key not in OF_PROMPT}
    body["prompt"] = [*prompt, *choice.token_ids]
    body["max_tokens"] = _limit(call.body) - 1
    rest = msgspec.structs.replace(call, path=COMPLETIONS, body=body)
    ids = (prompt, choice.token_ids) if call.body.get("return_token_ids") else None
    head = _chat_head(answer, text, ids) if is_chat else _head(answer, text, ids)
    return Continuation(rest, len(prompt), head, answer, is_chat)


def _limit(body: dict[str, Any]) -> Any:
    """Return the largest number of tokens; without one, vLLM's default depends on the prompt."""
    return body.get("max_completion_tokens") or body.get("max_tokens")


def _plain_text(message: dict[str, Any]) -> str | None:
    """Return a message's text; None if vLLM parsed a part of it as something else."""
    others = {key for key, value in message.items() if value} - {"role", "content"}
    return None if others else message.get("content")


def _head(answer: PrefillAnswer, text: str, ids: TokenIds | None) -> bytes:
    """Return the first event, in the form in which vLLM streams it."""
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    if ids is not None:
        choice["prompt_token_ids"], choice["token_ids"] = ids
    return _event(_chunk(answer, "text_completion", choice))


def _chat_head(answer: PrefillAnswer, text: str, ids: TokenIds | None) -> bytes:
    """Return the first two events of a chat: the role, and the first text."""
    rest = {"index": 0, "logprobs": None, "finish_reason": None}
    begin = _chunk(answer, CHAT_CHUNK, rest | {"delta": {"role": "assistant", "content": ""}})
    first: dict[str, Any] = rest | {"delta": {"content": text}}
    if ids is not None:
        begin["prompt_token_ids"], first["token_ids"] = ids
    return _event(begin) + _event(_chunk(answer, CHAT_CHUNK, first))


def _chunk(answer: PrefillAnswer, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    about = {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}
    return about | {"choices": [choice]}


def _chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in choice.items() if key != "text"}
    return others | {"delta": {"content": choice["text"]}}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
