"""Parser of clients' requests. Pure.

The router checks only what it needs: the model, whether to stream, the seed and its own field.
The workers check the rest and send their own error messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvferry.http.api_errors import ApiError
from kvferry.router.options import OnFailure

OWN_FIELD = "kvferry"
# Fields of the reference worker: report each token, and continue after these tokens of the answer.
REPORT, ANSWERED = "return_token_ids", "answered_token_ids"
# Fields for clients that read a stream.
STREAM_FIELDS = ("stream", "stream_options")
# Size of a room id and of a seed; all JSON parsers in use keep 63 bits.
ID_BITS = 63


class ApiCall(msgspec.Struct, frozen=True):
    """One request of a client.

    ``body`` is the client's, with the model added if it was left out, and a seed if the workers
    need one.
    """

    path: str
    body: dict[str, Any]
    model: str
    stream: bool
    on_failure: OnFailure


def new_id() -> int:
    """Return a new random room id or seed."""
    return secrets.randbits(ID_BITS)


class RequestDefaults(NamedTuple):
    """Values for fields that the client leaves out. Both workers sample with the same seed."""

    model: Callable[[str | None], str]
    on_failure: OnFailure
    seed: int | None


def parse_call(path: str, data: bytes, header: str | None, defaults: RequestDefaults) -> ApiCall:
    """Return a client's request; raise ``ApiError`` if it is invalid."""
    body = _read_object(data)
    model = defaults.model(_optional(body, "model", str, "a string"))
    stream = _optional(body, "stream", bool, "true or false")
    on_failure = _on_failure(body.pop(OWN_FIELD, None), header, defaults.on_failure)
    if body.get("seed") is None and defaults.seed is not None:
        body["seed"] = defaults.seed
    return ApiCall(path, body | {"model": model}, model, bool(stream), on_failure)


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
    """Return the client's failure policy; its other own fields are not accepted."""
    text: object = header
    if own is not None:
        if not isinstance(own, dict) or not set(own) <= {"on_failure"}:
            raise ApiError(
                400, f"{OWN_FIELD} accepts only on_failure", code="invalid_value", param=OWN_FIELD
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
