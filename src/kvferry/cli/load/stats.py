"""Statistics of replies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kvferry.cli.load.client import LoadReply


class Spread(msgspec.Struct, frozen=True):
    """The median and the 99th percentile."""

    p50: float
    p99: float


class Range(msgspec.Struct, frozen=True):
    """The smallest and the largest of some counts."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements at one concurrency; unknown values are None.

    ``seconds`` is from the first request to the last reply, and the throughput counts what was
    answered in this time. ``tpot_s`` is the time of each output token after the first. The server
    counts ``prompt_tokens``. A kvferry server reports ``carried_bytes``.
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


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return Spread(*map(float, np.percentile(known, (50, 99)))) if known else None


def tpot_s(reply: LoadReply) -> float | None:
    """Return the time of each output token after the first; None for a reply in one piece."""
    if len(reply.stamps) < 2 or reply.output_tokens < 2:
        return None
    return (reply.total_s - reply.stamps[0]) / (reply.output_tokens - 1)


def summarise(concurrency: int, replies: Sequence[LoadReply]) -> Level:
    """Return the level of these replies; its times are those of successful requests."""
    good = [reply for reply in replies if not reply.error]
    reasons = [reply.error for reply in replies if reply.error]
    ends = [reply.began + reply.total_s for reply in replies]
    seconds = max(ends) - min(reply.began for reply in replies) if replies else 0.0
    reports = [reply.report for reply in good]
    carried = [one["bytes"] for one in reports if isinstance(one.get("bytes"), int)]
    return Level(
        concurrency=concurrency,
        requests=len(replies),
        failed=len(reasons),
        first_failure=reasons[0] if reasons else None,
        seconds=seconds,
        requests_per_s=len(good) / seconds if seconds else 0.0,
        output_tokens_per_s=sum(r.output_tokens for r in good) / seconds if seconds else 0.0,
        ttft_s=spread(r.ttft_s for r in good),
        tpot_s=spread(tpot_s(r) for r in good),
        total_s=spread(r.total_s for r in good),
        prompt_tokens=_range(r.prompt_tokens for r in good),
        output_tokens=_range(r.output_tokens for r in good),
        carried_bytes=sum(carried) if carried else None,
    )


def _range(values: Iterable[int | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return Range(min(known), max(known)) if known else None
