"""The first token of an answer, in the metadata of a room.

The lead source sends the metadata when it closes the room. An engine whose decode samples only from
the second token on, such as SGLang, needs the first one from prefill. All engines write and read it
as ``{"sample": {"token": ID, "request": ...}}`` in MessagePack; the reference engine and SGLang add
fields of their own, which other engines ignore. vLLM computes the prompt's last token again at
decode, and needs no metadata.
"""

from __future__ import annotations

import msgspec


class FirstSample(msgspec.Struct, frozen=True):
    """The first token. ``request`` is the reference engine's name of the request."""

    token: int
    request: str = ""


class SampleMetadata(msgspec.Struct, frozen=True):
    """Metadata of a room that has nothing but the first token."""

    sample: FirstSample


def encoded_token(token: int) -> bytes:
    """Return the metadata of a room with this first token."""
    return msgspec.msgpack.encode(SampleMetadata(FirstSample(token)))
