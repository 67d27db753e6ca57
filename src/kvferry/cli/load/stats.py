"""Statistics: what a number of replies amounts to. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvferry.cli.load.client import LoadReply


class Spread(msgspec.Struct, frozen=True):
    """The middle of many values, and what one in a hundred exceeds."""

    p50: float
    p99: float


class Range(msgspec.Struct, frozen=True):
    """The least and the most of many counts."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with so many requests under way at any time.

    ``seconds`` is from the first question to the last answer, and throughput counts what was
    answered in them. ``tpot_s`` is the time of an output token after the first. ``prompt_tokens``
    is what the server counted. ``carried_bytes`` and ``modes`` (requests by mode) are what a
    kvferry server says of its transfers. What nobody told or nobody measured is None.
    """

    concurrency: int
    requests: int
    failed: int
    first_failure: str | None
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    total_s: Spread | None
    prompt_tokens: Range | None
    output_tokens: Range | None
    carried_bytes: int | None
    modes: dict[str, int]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all do not exceed, interpolated between neighbours."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
    return below + (above - below) * (at - math.floor(at))


def spread(values: Sequence[float]) -> Spread:
    """Of values of which there is at least one."""
    return Spread(percentile(values, 0.5), percentile(values, 0.99))


def tpot_s(reply: LoadReply) -> float | None:
    """The time of an output token after the first; None where the answer came in one piece."""
    if reply.ttft_s is None or len(reply.stamps) < 2 or reply.output_tokens < 2:
        return None
    return (reply.total_s - reply.ttft_s) / (reply.output_tokens - 1)


def summarise(concurrency: int, replies: Sequence[LoadReply]) -> Level:
    """One level out of its replies; times are of those that were answered."""
    good = [reply for reply in replies if not reply.error]
    reasons = [reply.error for reply in replies if reply.error]
    seconds = _seconds(replies)
    return Level(
        concurrency=concurrency,
        requests=len(replies),
        failed=len(reasons),
        first_failure=reasons[0] if reasons else None,
        seconds=seconds,
        requests_per_s=len(good) / seconds if seconds else 0.0,
        output_tokens_per_s=sum(r.output_tokens for r in good) / seconds if seconds else 0.0,
        ttft_s=_spread(r.ttft_s for r in good),
        tpot_s=_spread(tpot_s(r) for r in good),
        total_s=_spread(r.total_s for r in good),
        prompt_tokens=_range(r.prompt_tokens for r in good),
        output_tokens=_range(r.output_tokens for r in good),
        carried_bytes=_carried(good),
        modes=_modes(good),
    )


def _seconds(replies: Sequence[LoadReply]) -> float:
    if not replies:
        return 0.0
    ended = max(reply.began + reply.total_s for reply in replies)
    return ended - min(reply.began for reply in replies)


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def _range(values: Iterable[int | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return Range(min(known), max(known)) if known else None


def _carried(replies: Sequence[LoadReply]) -> int | None:
    told = [r.report["bytes"] for r in replies if isinstance(r.report.get("bytes"), int)]
    return sum(told) if told else None


def _modes(replies: Sequence[LoadReply]) -> dict[str, int]:
    told = (str(r.report["mode"]) for r in replies if r.report.get("mode"))
    return dict(sorted(Counter(told).items()))
