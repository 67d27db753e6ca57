"""Encoding of messages as frames. Decoding arbitrary bytes gives a message or a typed fault.

A frame is a msgpack array: magic, version, sender, incarnation, session, seq, body. The fields
before the body are the same in every version.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.errors import KvferryError
from kvferry.ids import MAX_ID, Peer, Session
from kvferry.protocol.messages import MAX_COUNT, VERSION, Body, Envelope

MAX_FRAME_BYTES = 8 << 20
MAGIC = "kvf"


class FrameFault(StrEnum):
    """Why a frame was rejected."""

    OVERSIZED = "oversized"
    FOREIGN = "foreign"
    VERSION = "version"
    MALFORMED = "malformed"


class BadFrame(NamedTuple):
    """A rejected frame. ``header`` is set if at least the header could be decoded."""

    fault: FrameFault
    header: Header | None = None


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The header of a frame, equal in every version, and the encoded body."""

    magic: Annotated[str, Meta(max_length=8)]
    version: Annotated[int, Meta(ge=0, lt=1 << 16)]
    sender: Peer
    incarnation: Annotated[int, Meta(ge=0, le=MAX_ID)]
    session: Session
    seq: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder = msgspec.msgpack.Decoder(Body)


def encode(envelope: Envelope) -> bytes:
    """Return the frame of a message. Raises ``KvferryError`` if no frame can carry it."""
    body = envelope.body
    head = MAGIC, VERSION, envelope.sender, envelope.incarnation, envelope.session, envelope.seq
    try:
        frame = _encoder.encode((*head, body))
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise KvferryError(f"no frame can carry this {type(body).__name__}: {error}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise KvferryError(
            f"a {type(body).__name__} of {len(frame)} bytes is above the limit of "
            f"{MAX_FRAME_BYTES}; use larger pages or shorter requests"
        )
    return frame


def decode(frame: bytes) -> Envelope | BadFrame:
    """Return the message in a frame, or why it was rejected. Never raises."""
    if len(frame) > MAX_FRAME_BYTES:
        return BadFrame(FrameFault.OVERSIZED)
    try:
        header = _header_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return BadFrame(FrameFault.FOREIGN)
    if header.magic != MAGIC:
        return BadFrame(FrameFault.FOREIGN)
    if header.version != VERSION:
        return BadFrame(FrameFault.VERSION, header)
    try:
        body = _body_decoder.decode(header.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return BadFrame(FrameFault.MALFORMED, header)
    return Envelope(header.sender, header.incarnation, header.session, header.seq, body)
