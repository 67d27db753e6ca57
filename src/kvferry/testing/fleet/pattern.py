"""Bytes that say where they belong: a function of room, tensor, layer, token and unit."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_MIX = np.uint64(0x9E3779B97F4A7C15)


def pattern(
    seed: int, tensor: str, layer: int, tokens: NDArray[np.int64], units: range, unit_bytes: int
) -> Bytes:
    """The bytes of ``[tokens, units]``, each unit ``unit_bytes`` long."""
    words = -(-unit_bytes // 8)
    token = tokens.astype(np.uint64)[:, None, None]
    unit = np.arange(units.start, units.stop, dtype=np.uint64)[None, :, None]
    word = np.arange(words, dtype=np.uint64)[None, None, :]
    name = np.uint64(zlib.crc32(f"{seed}/{tensor}/{layer}".encode()))
    mixed = _mixed(_mixed(token * np.uint64(4096) + unit) + (name << np.uint64(20)) + word)
    return mixed.view(np.uint8)[:, :, :unit_bytes]


def _mixed(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Cheap, and no two neighbours alike."""
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = values * _MIX
    return mixed ^ (mixed >> np.uint64(29))
