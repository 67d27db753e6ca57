"""Bundles: several frames in one message, each preceded by its length.

Handing a message to another thread costs far more than its bytes, so the frames that one turn
of a loop sends to a peer go out together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvferry.protocol.codec import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")
# Bounds how long one message keeps the receiving loop busy.
MAX_FRAMES = 1024
MAX_BUNDLE_BYTES = MAX_FRAME_BYTES + _LENGTH.size


def bundle(frames: Iterable[bytes]) -> list[bytes]:
    """Pack frames into as few messages as the limits allow."""
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
    """Return the frames of a message, or None if it is not a bundle."""
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
