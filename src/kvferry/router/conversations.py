"""Memory of who last held a conversation, and whether pulling its cache pays. Pure.

The router names the instance that last held the beginning of a prompt to the next prefill worker,
which pulls from it what its own prefix cache lacks. It remembers digests of a conversation's
pieces, never text, and nobody trusts the memory: the two workers compare digests of tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from enum import StrEnum, auto
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from kvferry.router.options import PullOptions

# Pieces of a completion's prompt: a holder is found if its prompt began with as many.
SPAN_TOKENS, SPAN_CHARS = 64, 256
DIGEST_BYTES = 16
# A remembered piece with its digest, its place in the table and its share of the holders' names.
PIECE_BYTES = 256
# Until answers show it: bytes of text for one token.
BYTES_PER_TOKEN = 4.0
# The weight of a new measurement, and the factor beyond which it counts as an outlier, such as the
# handshake of a first pull. Shorter prompts and pulls do not show the time per token.
NEW, MOST_FACTOR = 0.25, 4.0
LEAST_TOKENS = 256


class Piece(NamedTuple):
    """A beginning of a prompt. ``size``: its bytes of text, or its tokens if ``is_tokens``."""

    digest: bytes
    size: int
    is_answer: bool
    is_tokens: bool = False


class KnownHolders(NamedTuple):
    """Instances that hold a piece, the best first, and the tokens that the first generated."""

    holders: tuple[str, ...]
    answer_tokens: int


class PullDecision(StrEnum):
    """The router's decision about a prompt's prefix."""

    UNKNOWN = auto()
    HERE = auto()
    COMPUTE = auto()
    PULL = auto()


class HolderChoice(NamedTuple):
    """A decision, and the holder to name if it is to pull."""

    decision: PullDecision
    holder: str = ""


class PrefillReport(msgspec.Struct, frozen=True):
    """Report of a prefill worker about its prompt."""

    class Usage(msgspec.Struct, frozen=True):
        """OpenAI's field."""

        class Details(msgspec.Struct, frozen=True):
            """A part of OpenAI's field."""

            cached_tokens: int | None = None

        prompt_tokens: int = 0
        completion_tokens: int | None = None
        prompt_tokens_details: Details | None = None

        @property
        def cached_tokens(self) -> int:
            """The prompt's tokens that were not computed."""
            details = self.prompt_tokens_details
            return (details.cached_tokens or 0) if details else 0

    class Own(msgspec.Struct, frozen=True):
        """The reference engine's field."""

        pulled: int = 0
        pull_s: float | None = None
        compute_s: float | None = None

    usage: Usage | None = None
    kvferry: Own | None = None


def pieces_of(body: dict[str, Any]) -> list[Piece]:
    """Return the beginnings of a request's prompt, from short to long; none of several prompts."""
    own = [body.get("model"), body.get("cache_salt"), body.get("tools")]
    last = blake2b(_bytes(own), digest_size=DIGEST_BYTES).digest()
    found, size = [], 0
    for part, part_size, is_answer, is_tokens in _parts(body):
        last = blake2b(last + part, digest_size=DIGEST_BYTES).digest()
        size += part_size
        found.append(Piece(last, size, is_answer, is_tokens))
    return found


def _parts(body: dict[str, Any]) -> Iterator[tuple[bytes, int, bool, bool]]:
    """Yield each part's bytes and size, whether it is an answer, and whether it is tokens."""
    messages: Any = body.get("messages")
    prompt: Any = body.get("prompt")
    if isinstance(messages, list):
        for message in messages:
            part = _bytes(message)
            is_answer = isinstance(message, dict) and message.get("role") == "assistant"
            yield part, len(part), is_answer, False
        return
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_tokens:
        return
    span = SPAN_TOKENS if is_tokens else SPAN_CHARS
    for first, end in pairwise(range(0, len(prompt) + 1, span)):
        part = _bytes(prompt[first:end])
        yield part, span if is_tokens else len(part), False, is_tokens


def _bytes(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


class PullCosts:
    """Linear model of the seconds for pulling and for computing tokens, fitted to answers."""

    def __init__(self, options: PullOptions) -> None:
        self._fixed_s = options.fixed_s
        self._pull_s = options.token_s
        self._assumed_s = options.compute_token_s
        # By prefill worker: a large one computes faster.
        self._compute_s: dict[str, float] = {}

    def pays(self, prefill: str, num_tokens: int) -> bool:
        """Return whether a worker is expected to pull tokens faster than it computes them."""
        compute_s = self._compute_s.get(prefill, self._assumed_s) * num_tokens
        return self._fixed_s + self._pull_s * num_tokens < compute_s

    def learn(self, prefill: str, usage: PrefillReport.Usage, own: PrefillReport.Own) -> None:
        """Fit the model to a prefill worker's answer."""
        computed = usage.prompt_tokens - usage.cached_tokens
        if own.compute_s is not None and computed >= LEAST_TOKENS:
            before = self._compute_s.get(prefill, self._assumed_s)
            self._compute_s[prefill] = _moved(before, own.compute_s / computed)
        if own.pull_s is None or not own.pulled:
            return
        ratio = own.pull_s / ((self._fixed_s + self._pull_s * own.pulled) or 1)
        self._fixed_s = _moved(self._fixed_s, self._fixed_s * ratio)
        if own.pulled >= LEAST_TOKENS:
            self._pull_s = _moved(self._pull_s, self._pull_s * ratio)


def _moved(before: float, measured: float) -> float:
    """Return an estimate that a measurement has moved, by no more than an outlier may."""
    ratio = min(max(measured / (before or 1), 1 / MOST_FACTOR), MOST_FACTOR)
    return float(before * ratio**NEW)


class Conversations:
    """Table of the holders of beginnings of prompts; the least recently used are forgotten.

    It keeps ``max_pieces`` pieces, in at most ``max_bytes`` (``PIECE_BYTES`` for each).
    """

    def __init__(self, options: PullOptions) -> None:
        self._most = min(options.max_pieces, options.max_bytes // PIECE_BYTES)
        self._known: OrderedDict[bytes, KnownHolders] = OrderedDict()
        self._bytes_per_token = BYTES_PER_TOKEN
        self.costs = PullCosts(options)

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, pieces: list[Piece], holders: tuple[str, ...], answer_tokens: int) -> None:
        """Note which instances hold a prompt now; the first of them has also answered it."""
        # Backwards, so that the end of a conversation is forgotten before its beginning.
        for number, piece in enumerate(reversed(pieces[: self._most])):
            self._known[piece.digest] = KnownHolders(holders, 0 if number else answer_tokens)
            self._known.move_to_end(piece.digest)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def choose(self, pieces: list[Piece], prefill: str, up: Collection[str]) -> HolderChoice:
        """Return whether a prefill worker is to pull a prompt's beginning, and from whom."""
        for number in range(len(pieces) - 1, -1, -1):
            piece = pieces[number]
            if (known := self._known.get(piece.digest)) is None:
                continue
            others = [name for name in known.holders if name != prefill and name in up]
            if not others:
                return HolderChoice(
                    PullDecision.HERE if prefill in known.holders else PullDecision.UNKNOWN
                )
            missing = 0 if prefill in known.holders else self._tokens(piece)
            if others[0] == known.holders[0]:
                following = pieces[number + 1] if number + 1 < len(pieces) else piece
                answer = self._tokens(following) - self._tokens(piece)
                missing += answer if following.is_answer else known.answer_tokens
            if self.costs.pays(prefill, missing):
                return HolderChoice(PullDecision.PULL, others[0])
            return HolderChoice(PullDecision.COMPUTE)
        return HolderChoice(PullDecision.UNKNOWN)

    def learn(self, pieces: list[Piece], prefill: str, report: PrefillReport) -> None:
        """Take what a prefill worker says about a prompt."""
        usage = report.usage
        if usage is None:
            return
        if report.kvferry is not None:
            self.costs.learn(prefill, usage, report.kvferry)
        if pieces and not pieces[-1].is_tokens and usage.prompt_tokens >= LEAST_TOKENS:
            ratio = pieces[-1].size / usage.prompt_tokens
            self._bytes_per_token += NEW * (ratio - self._bytes_per_token)

    def _tokens(self, piece: Piece) -> int:
        return piece.size if piece.is_tokens else round(piece.size / self._bytes_per_token)
