"""A client's body, and what the two workers are sent instead. Pure.

The router looks at what it must: the model, whether to stream, the seed and its
own field. The workers check the rest and refuse it in their own words.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvferry.http.api_errors import ApiError
from kvferry.router.options import OnFailure

OWN_FIELD = "kvferry"
# What only makes sense where somebody listens to a stream.
STREAM_FIELDS = ("stream", "stream_options")
# A room and a seed fit into 63 bits, which every JSON reader of ours keeps.
ID_BITS = 63


class ClientAsk(msgspec.Struct, frozen=True):
    """One request of a client, checked as far as the router cares.

    ``body`` is what the client sent, with a model in any case and a seed where workers need one.
    """

    path: str
    body: dict[str, Any]
    model: str
    stream: bool
    on_failure: OnFailure

    def for_prefill(self, room: int, deadline_s: float) -> bytes:
        """The prompt's half: nobody listens to it."""
        body = {key: value for key, value in self.body.items() if key not in STREAM_FIELDS}
        return msgspec.json.encode(body | {OWN_FIELD: {"room": room, "deadline_s": deadline_s}})

    def for_decode(self, room: int, prefill: str, deadline_s: float) -> bytes:
        """The answer's half, with where the prompt's cache comes from.

        When the transfer fails, decode says so: the router knows whether another try is safe.
        """
        own = {"room": room, "prefill": prefill, "deadline_s": deadline_s}
        return msgspec.json.encode(self.body | {OWN_FIELD: own})

    def whole(self) -> bytes:
        """Prompt and answer at one worker."""
        return msgspec.json.encode(self.body)


def new_id() -> int:
    """A room or a seed that nobody else has."""
    return secrets.randbits(ID_BITS)


class Defaults(NamedTuple):
    """What holds where the client says nothing: both workers must sample alike, for one."""

    model: Callable[[str | None], str]
    on_failure: OnFailure
    seed: int | None


def read_ask(path: str, data: bytes, header: str | None, defaults: Defaults) -> ClientAsk:
    """A client's request, or an ``ApiError`` with what is wrong."""
    body = _read_object(data)
    model = defaults.model(_optional(body, "model", str, "a string"))
    stream = _optional(body, "stream", bool, "true or false")
    on_failure = _on_failure(body.pop(OWN_FIELD, None), header, defaults.on_failure)
    if body.get("seed") is None and defaults.seed is not None:
        body["seed"] = defaults.seed
    return ClientAsk(path, body | {"model": model}, model, bool(stream), on_failure)


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, f"the body is not a JSON object: {error}", code="invalid_json"
        ) from None


def _optional(body: dict[str, Any], key: str, kind: type, what: str) -> Any:
    value = body.get(key)
    if value is not None and not isinstance(value, kind):
        raise ApiError(400, f"{key} must be {what}", code="invalid_value", param=key)
    return value


def _on_failure(own: object, header: str | None, default: OnFailure) -> OnFailure:
    """What the client asks for. Rooms and workers are the router's to choose."""
    text: object = header
    if own is not None:
        if not isinstance(own, dict) or not set(own) <= {"on_failure"}:
            raise ApiError(
                400, f"{OWN_FIELD} takes on_failure only", code="invalid_value", param=OWN_FIELD
            )
        text = own.get("on_failure", header)
    if text is None:
        return default
    try:
        return OnFailure(str(text))
    except ValueError:
        raise ApiError(
            400,
            f"on_failure must be {', '.join(OnFailure)}, not {str(text)!r:.40}",
            param=f"{OWN_FIELD}.on_failure",
            code="invalid_value",
        ) from None
