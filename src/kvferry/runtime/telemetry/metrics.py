"""Numbers for Prometheus: one set of metrics per registry, one series per endpoint.

The label ``transport`` is the one that carried, where something was carried or is connected,
and else what the endpoint was told to use, such as ``auto``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from kvferry.ids import Peer
from kvferry.plan.choose import Path
from kvferry.protocol.outcome import Failure, Outcome
from kvferry.runtime.jobs import WriteJob
from kvferry.runtime.telemetry.histograms import RATES, SECONDS, Buckets, HistogramTable

LABELS = ("endpoint", "transport")


class _Metrics:
    """The metrics of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvferry_{name}", text, (*LABELS, *labels), registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_{name}", text, (*LABELS, *labels), registry=registry)

        self.rooms = counter(
            "rooms", "Rooms that ended, by outcome and reason", "outcome", "reason"
        )
        self.writes = counter("writes", "Writes that ended well, by path", "path")
        self.bytes = counter("bytes", "Bytes written to peers, by path", "path")
        self.pieces = counter("pieces", "Contiguous pieces written, by path", "path")
        self.seconds = counter("write_seconds", "Seconds that writes took, by path", "path")
        self.failed = counter("writes_failed", "Writes that did not end well, by fate", "fate")
        self.refusals = counter("refusals", "What was refused: frames, peers, connections", "what")
        self.credit_waits = counter("credit_waits", "Parcels written directly for want of a credit")
        self.open_rooms = gauge("open_rooms", "Rooms whose memory is held")
        self.quarantined = gauge("quarantined_rooms", "Failed rooms that wait for proof")
        self.staging_used = gauge("staging_used_bytes", "Staging memory in use")
        self.staging_total = gauge("staging_bytes", "Staging memory there is")
        self.broken = counter("broken_threads", "Threads of ours that a bug has ended", "thread")
        self.stalled = gauge("stalled_seconds", "Since a thread of ours is overdue", "thread")
        self.links = gauge("links", "Links that are up, by the transport that each took")
        self.heartbeat_age = gauge("heartbeat_age_seconds", "Since the quietest peer was heard")
        self.stages = HistogramTable(
            "kvferry_stage_seconds",
            "Seconds that the stages of rooms took",
            (*LABELS, "stage"),
            SECONDS,
            registry,
        )
        self.rates = HistogramTable(
            "kvferry_write_bytes_per_second",
            "Bytes per second of single writes, by path",
            (*LABELS, "path"),
            RATES,
            registry,
        )


_made: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()


_making = threading.Lock()


def _metrics_of(registry: CollectorRegistry) -> _Metrics:
    """Registering a metric twice is an error, so they are made once."""
    with _making:
        if registry not in _made:
            _made[registry] = _Metrics(registry)
        return _made[registry]


@dataclass
class PathStats:
    """What one path has carried."""

    writes: int = 0
    num_bytes: int = 0
    pieces: int = 0
    seconds: float = 0.0


@dataclass
class Stats:
    """One endpoint's own counts, for whoever holds it."""

    paths: dict[Path, PathStats] = field(default_factory=lambda: {p: PathStats() for p in Path})
    rooms: Tally[str] = field(default_factory=Tally)
    refusals: Tally[str] = field(default_factory=Tally)
    broken: Tally[str] = field(default_factory=Tally)
    stalled: dict[str, float] = field(default_factory=dict)
    # The transport of every link that is up, by peer.
    links: dict[str, str] = field(default_factory=dict)
    staging_used_bytes: int = 0


class Meter:
    """One endpoint's series. Belongs to the owner's thread."""

    def __init__(
        self, endpoint: str, transport: str, registry: CollectorRegistry | None = None
    ) -> None:
        self._metrics = _metrics_of(REGISTRY if registry is None else registry)
        self._labels = (endpoint, transport)
        self._linked: set[str] = set()
        self._seen: Tally[str] = Tally()
        self.stats = Stats()
        # Looked up once: finding a series costs more than counting in it.
        self._by_path: dict[tuple[str, Path], list[Counter]] = {}
        self._ends: dict[str, Counter] = {}
        for path in Path:
            self._counters(transport, path)
        self._stages: dict[str, Buckets] = {}
        self._rates: dict[tuple[str, Path], Buckets] = {}

    def _counters(self, transport: str, path: Path) -> list[Counter]:
        """Of what a transport has carried on a path: writes, bytes, pieces and seconds."""
        found = self._by_path.get((transport, path))
        if found is None:
            metrics, labels = self._metrics, (self._labels[0], transport, path)
            counters = metrics.writes, metrics.bytes, metrics.pieces, metrics.seconds
            found = [counter.labels(*labels) for counter in counters]
            self._by_path[transport, path] = found
        return found

    def ended(self, outcome: Outcome) -> None:
        """A room has ended."""
        failed = isinstance(outcome, Failure)
        reason = str(outcome.code) if isinstance(outcome, Failure) else ""
        self.stats.rooms[reason or "done"] += 1
        ends = self._ends.get(reason)
        if ends is None:
            word = "failed" if failed else "done"
            ends = self._ends[reason] = self._metrics.rooms.labels(*self._labels, word, reason)
        ends.inc()

    def wrote(self, ending: WriteJob) -> None:
        """A write has ended."""
        transport = ending.transport or self._labels[1]
        if ending.fate is not None:
            self._metrics.failed.labels(self._labels[0], transport, ending.fate).inc()
            return
        stats = self.stats.paths[ending.path]
        stats.writes += 1
        stats.num_bytes += ending.num_bytes
        stats.pieces += ending.num_pieces
        stats.seconds += ending.seconds
        counters = self._counters(transport, ending.path)
        amounts = (1, ending.num_bytes, ending.num_pieces, ending.seconds)
        for counter, amount in zip(counters, amounts, strict=True):
            counter.inc(amount)
        self.took("wire", ending.seconds)
        if ending.seconds > 0:
            rates = self._rates_of(transport, ending.path)
            rates.observe(ending.num_bytes / ending.seconds)

    def _rates_of(self, transport: str, path: Path) -> Buckets:
        found = self._rates.get((transport, path))
        if found is None:
            found = self._metrics.rates.series(self._labels[0], transport, str(path))
            self._rates[transport, path] = found
        return found

    def took(self, stage: str, seconds: float) -> None:
        """A stage of a room, or a part of it, is over."""
        buckets = self._stages.get(stage)
        if buckets is None:
            buckets = self._stages[stage] = self._metrics.stages.series(*self._labels, stage)
        buckets.observe(seconds)

    def refused(self, what: str, times: int = 1) -> None:
        """Something was not taken."""
        self.stats.refusals[what] += times
        self._metrics.refusals.labels(*self._labels, what).inc(times)

    def total(self, what: str, count: int) -> None:
        """A count that somebody else keeps: add what is new of it."""
        new = count - self._seen[what]
        if new <= 0:
            return
        self._seen[what] = count
        if what == "impatient":
            self._metrics.credit_waits.labels(*self._labels).inc(new)
        else:
            self.refused(what, new)

    def now(self, *, open_rooms: int, quarantined: int, age_s: float) -> None:
        """How things stand."""
        self._metrics.open_rooms.labels(*self._labels).set(open_rooms)
        self._metrics.quarantined.labels(*self._labels).set(quarantined)
        self._metrics.heartbeat_age.labels(*self._labels).set(age_s)

    def linked(self, peer: Peer, transport: str) -> None:
        """A link has its transport."""
        self.links({**self.stats.links, str(peer): transport})

    def links(self, links: Mapping[str, str]) -> None:
        """The transport of every link that is up, by peer."""
        if links == self.stats.links:
            return
        self.stats.links = dict(links)
        counts = Tally(links.values())
        self._linked |= set(counts)
        for transport in self._linked:
            self._metrics.links.labels(self._labels[0], transport).set(counts[transport])

    def broke(self, thread: str) -> None:
        """A bug has ended a thread."""
        self.stats.broken[thread] += 1
        self._metrics.broken.labels(*self._labels, thread).inc()

    def stalled(self, thread: str, seconds: float) -> None:
        """On the watchman's thread: a thread is overdue for so long, or no longer."""
        self.stats.stalled[thread] = seconds
        self._metrics.stalled.labels(*self._labels, thread).set(seconds)

    def staging(self, used_bytes: int, total_bytes: int) -> None:
        """How much of the staging memory is in use."""
        self.stats.staging_used_bytes = used_bytes
        self._metrics.staging_used.labels(*self._labels).set(used_bytes)
        self._metrics.staging_total.labels(*self._labels).set(total_bytes)

    def close(self) -> None:
        """The endpoint is over: it has no rooms and no staging any more."""
        metrics = self._metrics
        for gauge in (
            metrics.open_rooms,
            metrics.quarantined,
            metrics.staging_used,
            metrics.staging_total,
            metrics.heartbeat_age,
        ):
            with contextlib.suppress(KeyError):
                gauge.remove(*self._labels)
        for transport in self._linked:
            with contextlib.suppress(KeyError):
                metrics.links.remove(self._labels[0], transport)
        for thread in self.stats.stalled:
            with contextlib.suppress(KeyError):
                metrics.stalled.remove(*self._labels, thread)
