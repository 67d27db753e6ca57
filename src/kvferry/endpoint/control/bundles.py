"""Several frames in one message: each preceded by its length.

Sending costs a change of threads each time, far more than the bytes, so what one
turn of an owner has to say to a peer goes out together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvferry.protocol.codec import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")
# A few thousand frames keep an owner busy for as long as it may be.
MAX_FRAMES = 1024
MAX_BUNDLE_BYTES = MAX_FRAME_BYTES + _LENGTH.size


def bundle(frames: Iterable[bytes]) -> list[bytes]:
    """As few messages as the limit allows."""
    messages: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for frame in frames:
        full = size + _LENGTH.size + len(frame) > MAX_BUNDLE_BYTES or len(parts) == 2 * MAX_FRAMES
        if parts and full:
            messages.append(b"".join(parts))
            parts, size = [], 0
        parts += [_LENGTH.pack(len(frame)), frame]
        size += _LENGTH.size + len(frame)
    return [*messages, b"".join(parts)] if parts else messages


def unbundle(message: bytes) -> list[bytes] | None:
    """The frames of a message; None if it is no bundle."""
    frames: list[bytes] = []
    at = 0
    while at < len(message):
        if at + _LENGTH.size > len(message) or len(frames) == MAX_FRAMES:
            return None
        (length,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        if at + length > len(message):
            return None
        frames.append(message[at : at + length])
        at += length
    return frames
