"""``kv_transfer_params``: what clients and proxies say of a transfer, taken with suspicion. Pure.

To prefill: ``{"do_remote_decode": true}``, and optionally ``"kvferry": {"room": ...}`` where who
asks has chosen the room. To decode: ``{"do_remote_prefill": true, "kvferry": {"room": ...,
"prefill": NAME, "tokens": N}}``, which is what prefill answers with. Nothing in it names memory or
a host: an instance is found by name among those that the discovery service knows. Keys of other
connectors are left alone, because proxies send them.
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
    """Compute this, for somebody else to decode. Without a room, prefill takes one."""

    room: Room | None = None


class DecodeParams(msgspec.Struct, frozen=True):
    """Decode what that instance computes in that room; its first ``tokens``, or all."""

    room: Room
    prefill: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None


def asked_of_prefill(params: object) -> PrefillParams | None:
    """What a prefill is asked for; None where nobody asks. Raises ``InputError``."""
    if not _wanted(params, "do_remote_decode"):
        return None
    assert isinstance(params, Mapping)
    return _read(params.get(OWN_FIELD) or {}, PrefillParams)


def asked_of_decode(params: object) -> DecodeParams | None:
    """What a decode is asked for; None where nobody asks. Raises ``InputError``."""
    if not _wanted(params, "do_remote_prefill"):
        return None
    assert isinstance(params, Mapping)
    return _read(params.get(OWN_FIELD), DecodeParams)


def for_decode(room: Room, instance: str, num_tokens: int) -> dict[str, Any]:
    """What prefill answers with, for whoever asks decode next."""
    own = {"room": room, "prefill": instance, "tokens": num_tokens}
    return {"do_remote_prefill": True, "do_remote_decode": False, OWN_FIELD: own}


def _wanted(params: object, flag: str) -> bool:
    return isinstance(params, Mapping) and params.get(flag) is True


def _read(own: object, kind: type[T]) -> T:
    try:
        asked = msgspec.convert(own, kind)
        # JSON may have half a surrogate in a text, which no frame can carry.
        msgspec.msgpack.encode(asked)
        return asked
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:
        raise InputError(
            f"kv_transfer_params.{OWN_FIELD} can't be used ({error}); pass on what prefill "
            f"answered with"
        ) from None
