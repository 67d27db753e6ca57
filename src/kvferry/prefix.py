"""Chain of digests over a token sequence, by which two instances find their longest common prefix.

The chain has one digest for each span of ``SPAN_TOKENS`` tokens, whatever the page size and the
sharding are. Each digest covers the digest before it, so that equal digests mean equal prefixes,
computed with the same model, adapters and salt. Tokens themselves are never sent. A frame carries
the short form, whose collisions cost a transfer and nothing else: the room that follows compares
the full digest (``digest``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from kvferry.digest import DIGEST_BYTES, digest_of, token_ids
from kvferry.errors import InputError

SPAN_TOKENS = 16
# The short form: the first bytes of each digest.
SHORT_BYTES = 8
# A short chain of two million tokens has 1 MiB. The rest of a longer sequence is not in its chain.
MAX_SPANS = 1 << 17
MAX_SHORT_CHAIN = MAX_SPANS * SHORT_BYTES
_PURPOSE = b"kvferry-chain-1"
_NONE: Mapping[str, str | bytes] = {}


class PrefixChain:
    """Digests of a sequence's prefixes. ``prefix_chain`` makes it. Immutable.

    ``num_tokens`` counts the tokens that it covers: whole spans only.
    """

    __slots__ = ("_digests", "num_tokens", "short")

    def __init__(self, digests: bytes) -> None:
        self._digests = digests
        self.num_tokens = len(digests) // DIGEST_BYTES * SPAN_TOKENS
        table = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
        # The form that a frame carries.
        self.short = table[:, :SHORT_BYTES].tobytes()

    def digest(self, tokens: int) -> bytes:
        """Return the full digest of the first ``tokens`` tokens, a multiple of ``SPAN_TOKENS``."""
        spans, rest = divmod(tokens, SPAN_TOKENS)
        if rest or not 0 < tokens <= self.num_tokens:
            raise InputError(
                f"a chain of {self.num_tokens} tokens has no digest at {tokens}; ask at a "
                f"multiple of {SPAN_TOKENS} tokens within it"
            )
        return self._digests[(spans - 1) * DIGEST_BYTES : spans * DIGEST_BYTES]

    def first(self, tokens: int) -> PrefixChain:
        """Return the chain of the first ``tokens`` tokens, without a part of a span."""
        return PrefixChain(self._digests[: max(0, tokens) // SPAN_TOKENS * DIGEST_BYTES])

    def common_tokens(self, asked: bytes) -> int:
        """Return how many first tokens this sequence shares with that of a short chain."""
        return common_tokens(self.short, asked)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixChain) and self._digests == other._digests

    def __hash__(self) -> int:
        return hash(self._digests)

    def __repr__(self) -> str:
        return f"<PrefixChain of {self.num_tokens} tokens>"


def prefix_chain(
    tokens: Sequence[int] | np.ndarray[Any, Any],
    *,
    model: str,
    dtype: str,
    adapters: Sequence[str] = (),
    extra: Mapping[str, str | bytes] = _NONE,
) -> PrefixChain:
    """Return the chain of a token sequence. The arguments are those of ``digest_of``.

    It covers at most ``MAX_SPANS`` spans.
    """
    ids = token_ids(tokens)
    spans = min(len(ids) // SPAN_TOKENS, MAX_SPANS)
    data = memoryview(ids[: spans * SPAN_TOKENS].tobytes())
    size = SPAN_TOKENS * ids.itemsize
    last = digest_of((), model=model, dtype=dtype, adapters=adapters, extra=extra)
    digests = bytearray()
    for at in range(0, spans * size, size):
        step = blake2b(last, digest_size=DIGEST_BYTES, person=_PURPOSE)
        step.update(data[at : at + size])
        last = step.digest()
        digests += last
    return PrefixChain(bytes(digests))


def common_tokens(one: bytes, two: bytes) -> int:
    """Return how many first tokens the sequences of two short chains share."""
    # A digest covers those before it, so two chains agree up to a point and nowhere behind it.
    low, high = 0, min(len(one), len(two)) // SHORT_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * SHORT_BYTES, middle * SHORT_BYTES)
        low, high = (middle, high) if one[last] == two[last] else (low, middle - 1)
    return low * SPAN_TOKENS


def span_digests(short: bytes) -> list[bytes]:
    """Return the digests of a short chain, one for each span."""
    return [short[at : at + SHORT_BYTES] for at in range(0, len(short), SHORT_BYTES)]


def chain_tokens(short: bytes) -> int:
    """Return the number of tokens that a short chain covers."""
    return len(short) // SHORT_BYTES * SPAN_TOKENS


def checked_short_chain(short: bytes) -> bytes:
    """Return a short chain if a frame can carry it."""
    if len(short) % SHORT_BYTES or not 0 < len(short) <= MAX_SHORT_CHAIN:
        raise InputError(
            f"a short chain has 1 to {MAX_SPANS} digests of {SHORT_BYTES} bytes, not "
            f"{len(short)} bytes; make it with kvferry.prefix_chain"
        )
    return short
