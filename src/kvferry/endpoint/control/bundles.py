"""Bundles: several frames in one message, each preceded by its length.

Handing a message to another thread costs far more than its bytes, so the frames that one turn
of a loop sends to a peer go out together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import inf

from kvferry.protocol.codec import MAX_FRAME_BYTES

LENGTH = struct.Struct(">I")
# Bounds how long one message keeps the receiving loop busy.
MAX_FRAMES = 1024
MAX_BUNDLE_BYTES = MAX_FRAME_BYTES + LENGTH.size


def bundle(frames: Iterable[bytes]) -> list[bytes]:
    """Pack frames into as few messages as the limits allow."""
    messages: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for frame in frames:
        full = size + LENGTH.size + len(frame) > MAX_BUNDLE_BYTES or len(parts) == 2 * MAX_FRAMES
        if parts and full:
            messages.append(b"".join(parts))
            parts, size = [], 0
        parts += [LENGTH.pack(len(frame)), frame]
        size += LENGTH.size + len(frame)
    return [*messages, b"".join(parts)] if parts else messages


def unbundle(message: bytes) -> list[bytes] | None:
    """Return the frames of a message, or None if it is not a bundle."""
    frames, end = split(message, MAX_FRAMES)
    return frames if end == len(message) else None


def split(data: bytes, most: float = inf) -> tuple[list[bytes], int]:
    """Return the complete frames, at most ``most``, that ``data`` starts with, and their end."""
    frames: list[bytes] = []
    at = 0
    while at + LENGTH.size <= len(data) and len(frames) < most:
        (length,) = LENGTH.unpack_from(data, at)
        begin = at + LENGTH.size
        if begin + length > len(data):
            break
        frames.append(data[begin : begin + length])
        at = begin + length
    return frames, at
