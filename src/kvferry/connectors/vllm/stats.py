"""Statistics of a rank's rooms, in the form that vLLM aggregates."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median
from typing import Any

from kvferry import Failure, Outgoing

# Keys of the statistics and names of the metrics.
DONE, FAILED, SENT_BYTES, SECONDS = "rooms_done", "rooms_failed", "bytes_sent", "seconds"
FAILURES = "failures"
MIB = 1 << 20


def no_counts() -> dict[str, Any]:
    """Return empty statistics."""
    return {DONE: 0, FAILED: 0, SENT_BYTES: 0, SECONDS: [], FAILURES: {}}


def add_counts(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two statistics."""
    failures = Counter(one[FAILURES]) + Counter(two[FAILURES])
    sums: dict[str, Any] = {key: one[key] + two[key] for key in (DONE, FAILED, SENT_BYTES, SECONDS)}
    return sums | {FAILURES: dict(failures)}


def is_nothing(counts: dict[str, Any]) -> bool:
    """Whether the statistics are empty."""
    return not (counts[DONE] or counts[FAILED] or counts[SENT_BYTES])


def shown_counts(counts: dict[str, Any]) -> dict[str, int | float]:
    """Return the statistics for vLLM's log line."""
    shown: dict[str, int | float] = {
        "rooms done": counts[DONE],
        "rooms failed": counts[FAILED],
        "MiB sent": round(counts[SENT_BYTES] / MIB, 2),
    }
    shown |= {f"failed: {code}": number for code, number in sorted(counts[FAILURES].items())}
    if counts[SECONDS]:
        shown["mean ms to receive"] = round(1e3 * fmean(counts[SECONDS]), 1)
        shown["median ms to receive"] = round(1e3 * median(counts[SECONDS]), 1)
    return shown


class RoomCounts:
    """Statistics of one rank since the last ``take``."""

    def __init__(self) -> None:
        self._counts = no_counts()

    def sent(self, handle: Outgoing) -> None:
        """Count an ended room of a source."""
        self._ended(handle.failure)
        self._counts[SENT_BYTES] += sum(handle.carried.values())

    def received(self, failure: Failure | None, seconds: float) -> None:
        """Count an ended room of a target, which took ``seconds``."""
        self._ended(failure)
        if failure is None:
            self._counts[SECONDS].append(seconds)

    def _ended(self, failure: Failure | None) -> None:
        if failure is None:
            self._counts[DONE] += 1
            return
        self._counts[FAILED] += 1
        failures = self._counts[FAILURES]
        failures[str(failure.code)] = failures.get(str(failure.code), 0) + 1

    def take(self) -> dict[str, Any] | None:
        """Return the statistics and reset them; None if they are empty."""
        if is_nothing(self._counts):
            return None
        taken, self._counts = self._counts, no_counts()
        return taken
