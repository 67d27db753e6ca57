"""Validation of ``kv_transfer_params``, which clients and proxies send with a request.

To prefill: ``{"do_remote_decode": true}``, optionally with ``"kvferry": {"room": ...}`` if the
caller chooses the room, and ``"first_token": true`` if decode needs the answer's first token, as
SGLang does. With ``"holder": NAME`` the engine first pulls what it lacks of the prompt from that
instance; that needs no ``do_remote_decode``. To decode: ``{"do_remote_prefill": true, "kvferry":
{"room": ..., "prefill": NAME, "tokens": N}}``, which is prefill's answer. No parameter names memory
or a host: instances are found by name through the discovery service. Keys of other connectors are
ignored, because proxies send them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvferry import MAX_NAME, InputError, Room

T = TypeVar("T")

OWN_FIELD = "kvferry"
MAX_TOKENS = 1 << 32


class PrefillParams(msgspec.Struct, frozen=True):
    """Prefill for a remote decode. With ``room`` None the prefill instance chooses one.

    ``first_token``: the room is closed with the first token of the answer.
    """

    room: Room | None = None
    first_token: bool = False


class PullParams(msgspec.Struct, frozen=True):
    """Pull the prompt's beginning from ``holder``; None if nobody is known to have it."""

    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)] | None = None


class DecodeParams(msgspec.Struct, frozen=True):
    """Receive the first ``tokens`` tokens of the prompt, or all, from a prefill instance's room."""

    room: Room
    prefill: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None


def read_prefill_params(params: object) -> PrefillParams | None:
    """Return the parameters for prefill; None if there are none. Raises ``InputError``."""
    if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
        return None
    return _convert(params.get(OWN_FIELD) or {}, PrefillParams)


def read_decode_params(params: object) -> DecodeParams | None:
    """Return the parameters for decode; None if there are none. Raises ``InputError``."""
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    return _convert(params.get(OWN_FIELD), DecodeParams)


def read_holder(params: object) -> str | None:
    """Return the instance to pull from; None if there is none. Raises ``InputError``.

    A prompt that prefill transfers is not pulled.
    """
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is True:
        return None
    return _convert(params.get(OWN_FIELD) or {}, PullParams).holder


def decode_params(room: Room, instance: str, num_tokens: int) -> dict[str, Any]:
    """Return prefill's answer: the parameters to send to decode."""
    own = {"room": room, "prefill": instance, "tokens": num_tokens}
    return {"do_remote_prefill": True, "do_remote_decode": False, OWN_FIELD: own}


def _convert(value: object, kind: type[T]) -> T:
    try:
        params = msgspec.convert(value, kind)
        # JSON strings may contain a lone surrogate, which no frame can carry.
        msgspec.msgpack.encode(params)
        return params
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:
        raise InputError(
            f"kv_transfer_params.{OWN_FIELD} can't be used ({error}); pass on what prefill "
            f"answered with"
        ) from None
