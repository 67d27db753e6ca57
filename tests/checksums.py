"""The checksum of an entry, written from docs/protocol.md with Python's integers."""

from __future__ import annotations

WORD = 2**64
HALF = 2**32
CHUNK_BYTES = 4096


def mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def key(seed: int, index: int) -> int:
    return mix((seed + (index + 1) * 0x9E3779B97F4A7C15) % WORD)


def product(word: int, by: int) -> int:
    return ((word + by) % HALF) * ((word // HALF + by // HALF) % HALF)


def cell_value(
    seed: int, place: tuple[int, int, int], token: int, unit: int, content: bytes
) -> int:
    """Return the value of one entry. ``place`` is group, tensor and layer."""
    group, tensor, layer = place
    label = mix(seed ^ (group << 48 | tensor << 32 | layer))
    return labelled_value(seed, label, token, unit, content)


def labelled_value(seed: int, label: int, token: int, unit: int, content: bytes) -> int:
    """Return the value of one entry with this label."""
    total = 0
    for chunk, first in enumerate(range(0, len(content), CHUNK_BYTES)):
        data = content[first : first + CHUNK_BYTES]
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
        low, high = (
            sum(product(word, key(seed, first_key + i)) for i, word in enumerate(words))
            for first_key in (0, CHUNK_BYTES // 8)
        )
        at = mix((label + (token << 31 | unit << 15 | chunk)) % WORD)
        total += mix((mix((low + at) % WORD) + high) % WORD)
    return total % WORD
