"""Prometheus metrics: one set per registry, one series per endpoint.

The label ``transport`` is the transport that was used, or the configured one (such as ``auto``)
for metrics that no single transport caused.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter as Tally
from dataclasses import dataclass, field
from time import monotonic

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from kvferry.ids import Peer, Room
from kvferry.plan.choose import TransferMode
from kvferry.protocol.outcome import Failure, Outcome
from kvferry.protocol.states import LinkState
from kvferry.telemetry.histograms import RATES, SECONDS, Buckets, HistogramTable
from kvferry.telemetry.observer import (
    LoopStatus,
    ObservedRoom,
    ObservedWrite,
    Observer,
    WaitReason,
)
from kvferry.telemetry.steps import StepKind

LABELS = ("endpoint", "transport")
# Counters of the machine: frames it rejected, and chunks that did not wait for a credit.
REJECTED = ("refused", "misdirected", "other-incarnation")
IMPATIENT = "impatient"
# And what sources sent without the sums that were asked for.
UNPROVEN = "unproven"
KEPT = (LinkState.GREETING, LinkState.UP)
# Ages of rooms in seconds, each with the name of the ages from it up to the next.
AGES = ((0.0, "0-1s"), (1.0, "1-10s"), (10.0, "10-60s"), (60.0, "60s+"))
COPY_STAGES = {StepKind.GATHERED: "gather", StepKind.SCATTERED: "scatter"}


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
        self.writes = counter("writes", "Writes that succeeded", "mode")
        self.bytes = counter("bytes", "Bytes written to peers", "mode")
        self.pieces = counter("pieces", "Contiguous pieces written", "mode")
        self.seconds = counter("write_seconds", "Seconds spent in writes", "mode")
        self.failed = counter("writes_failed", "Writes that failed, by fate", "fate")
        self.rejected = counter("rejected", "Rejected frames, peers and connections", "reason")
        self.credit_waits = counter("credit_waits", "Chunks written directly for want of a credit")
        self.unproven = counter("unproven", "Content taken without the sums that were asked for")
        self.open_rooms = gauge("open_rooms", "Rooms whose memory is held")
        self.quarantined = gauge("quarantined_rooms", "Failed rooms whose memory waits for proof")
        self.quarantined_bytes = gauge("quarantined_bytes", "Memory that waits for proof", "side")
        self.pinned_pages = gauge("pinned_pages", "Pages held for rooms", "side", "age")
        self.pinned_tokens = gauge("pinned_tokens", "Tokens in these pages", "side", "age")
        self.waiting = gauge("waiting_rooms", "Open rooms by what they wait for", "side", "reason")
        self.credits = gauge("outstanding_credits", "Staging credits granted, not used", "side")
        self.staging_used = gauge("staging_used_bytes", "Staging memory in use")
        self.staging_total = gauge("staging_bytes", "Staging memory in all")
        self.broken = counter("broken_threads", "Endpoint threads that a bug has ended", "thread")
        self.stalled = gauge("stalled_seconds", "Seconds without progress of a thread", "thread")
        self.links = gauge("links", "Links that are up")
        self.heartbeat_age = gauge("heartbeat_age_seconds", "Age of the quietest peer's last frame")
        self.stages = HistogramTable(
            "kvferry_stage_seconds",
            "Seconds of each stage of a room",
            (*LABELS, "stage"),
            SECONDS,
            registry,
        )
        self.rates = HistogramTable(
            "kvferry_write_bytes_per_second",
            "Bytes per second of single writes",
            (*LABELS, "mode"),
            RATES,
            registry,
        )


_made: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _metrics_of(registry: CollectorRegistry) -> _Metrics:
    """Return the registry's metrics; a metric can be registered only once."""
    with _making:
        if registry not in _made:
            _made[registry] = _Metrics(registry)
        return _made[registry]


@dataclass
class ModeStats:
    """Totals of one transfer mode."""

    writes: int = 0
    num_bytes: int = 0
    pieces: int = 0
    seconds: float = 0.0


@dataclass
class EndpointStats:
    """Counts of one endpoint since its start."""

    modes: dict[TransferMode, ModeStats] = field(
        default_factory=lambda: {mode: ModeStats() for mode in TransferMode}
    )
    rooms: Tally[str] = field(default_factory=Tally)
    rejected: Tally[str] = field(default_factory=Tally)
    broken: Tally[str] = field(default_factory=Tally)
    stalled: dict[str, float] = field(default_factory=dict)
    # Transport of each link that is up, by peer.
    links: dict[str, str] = field(default_factory=dict)
    staging_used_bytes: int = 0
    quarantined_bytes: int = 0


class EndpointMetrics(Observer):
    """One endpoint's series. Belongs to the loop thread."""

    def __init__(
        self, endpoint: str, transport: str, side: str, registry: CollectorRegistry | None = None
    ) -> None:
        self._metrics = _metrics_of(REGISTRY if registry is None else registry)
        self._labels = (endpoint, transport)
        self._side = side
        self._held = self._held_series()
        self._linked: set[str] = set()
        self._seen: Tally[str] = Tally()
        self.stats = EndpointStats()
        # Bytes written to each peer, by mode.
        self.sent: dict[Peer, dict[TransferMode, int]] = {}
        # Children are kept, because looking one up costs more than counting.
        self._by_mode: dict[tuple[str, TransferMode], list[Counter]] = {}
        self._ends: dict[str, Counter] = {}
        for mode in TransferMode:
            self._counters(transport, mode)
        self._stages: dict[str, Buckets] = {}
        self._rates: dict[tuple[str, TransferMode], Buckets] = {}

    def _counters(self, transport: str, mode: TransferMode) -> list[Counter]:
        """Return the counters of writes, bytes, pieces and seconds."""
        found = self._by_mode.get((transport, mode))
        if found is None:
            metrics, labels = self._metrics, (self._labels[0], transport, mode)
            counters = metrics.writes, metrics.bytes, metrics.pieces, metrics.seconds
            found = [counter.labels(*labels) for counter in counters]
            self._by_mode[transport, mode] = found
        return found

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Count the room and its time; at a source, also before and after prefill's end."""
        reason = str(outcome.code) if isinstance(outcome, Failure) else ""
        self.stats.rooms[reason or "done"] += 1
        ends = self._ends.get(reason)
        if ends is None:
            word = "failed" if reason else "done"
            ends = self._ends[reason] = self._metrics.rooms.labels(*self._labels, word, reason)
        ends.inc()
        if not reason:
            now = monotonic()
            self._took("room", now - room.begun)
            if room.finished is not None:
                self._took("prefill", room.finished - room.begun)
                self._took("after_prefill", now - room.finished)

    def write(self, job: ObservedWrite, at: float) -> None:
        """Count a write, or its failure."""
        transport = job.transport or self._labels[1]
        if job.fate is not None:
            self._metrics.failed.labels(self._labels[0], transport, job.fate).inc()
            return
        mode, num_bytes, seconds = job.mode, job.num_bytes, job.seconds
        peer = job.action.transfer.peer
        modes = self.sent.get(peer)
        if modes is None:
            modes = self.sent[peer] = dict.fromkeys(TransferMode, 0)
        modes[mode] += num_bytes
        stats = self.stats.modes[mode]
        stats.writes += 1
        stats.num_bytes += num_bytes
        stats.pieces += job.num_pieces
        stats.seconds += seconds
        counters = self._counters(transport, mode)
        amounts = (1, num_bytes, job.num_pieces, seconds)
        for counter, amount in zip(counters, amounts, strict=True):
            counter.inc(amount)
        self._took("wire", seconds)
        if seconds > 0:
            self._rates_of(transport, mode).observe(num_bytes / seconds)

    def _rates_of(self, transport: str, mode: TransferMode) -> Buckets:
        found = self._rates.get((transport, mode))
        if found is None:
            found = self._metrics.rates.series(self._labels[0], transport, str(mode))
            self._rates[transport, mode] = found
        return found

    def copy(
        self, room: Room, peer: Peer, kind: StepKind, at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """Count the copy's time."""
        self._took(COPY_STAGES[kind], seconds)

    def _took(self, stage: str, seconds: float) -> None:
        """Count the time of a stage."""
        buckets = self._stages.get(stage)
        if buckets is None:
            buckets = self._stages[stage] = self._metrics.stages.series(*self._labels, stage)
        buckets.observe(seconds)

    def refused(self, what: str, times: int = 1) -> None:
        """Count a rejection."""
        self.stats.rejected[what] += times
        self._metrics.rejected.labels(*self._labels, what).inc(times)

    def status(self, status: LoopStatus) -> None:
        """Set the gauges, and add the machine's new counts."""
        metrics, labels = self._metrics, self._labels
        up = [link for link in status.links if link.state is LinkState.UP]
        age_s = max((status.at - link.heard_at for link in up), default=0.0)
        metrics.open_rooms.labels(*labels).set(status.num_open)
        metrics.quarantined.labels(*labels).set(status.num_quarantined)
        metrics.heartbeat_age.labels(*labels).set(age_s)
        self._set_held(status)
        if status.staging_bytes:
            self.stats.staging_used_bytes = status.staging_used_bytes
            metrics.staging_used.labels(*labels).set(status.staging_used_bytes)
            metrics.staging_total.labels(*labels).set(status.staging_bytes)
        kept = [link for link in status.links if link.transport and link.state in KEPT]
        self._set_links({str(link.peer): link.transport for link in kept})
        for peer in self.sent.keys() - {link.peer for link in status.links}:
            del self.sent[peer]
        counters = {IMPATIENT: metrics.credit_waits, UNPROVEN: metrics.unproven}
        for what in (*REJECTED, *counters):
            new = status.counts.get(what, 0) - self._seen[what]
            self._seen[what] += new
            if new and what in counters:
                counters[what].labels(*labels).inc(new)
            elif new:
                self.refused(what, new)

    def _held_series(self) -> dict[tuple[str, str], tuple[Gauge, tuple[str, ...]]]:
        """Return the gauge and the labels of each amount that ``_set_held`` sets."""
        metrics, labels = self._metrics, (*self._labels, self._side)
        found: dict[tuple[str, str], tuple[Gauge, tuple[str, ...]]] = {
            ("credits", ""): (metrics.credits, labels),
            ("quarantined", ""): (metrics.quarantined_bytes, labels),
        }
        for _, age in AGES:
            found["pages", age] = (metrics.pinned_pages, (*labels, age))
            found["tokens", age] = (metrics.pinned_tokens, (*labels, age))
        for reason in WaitReason:
            found["rooms", reason] = (metrics.waiting, (*labels, reason))
        return found

    def _set_held(self, status: LoopStatus) -> None:
        """Set the gauges of what open rooms pin and wait for."""
        amounts: Tally[tuple[str, str]] = Tally({("credits", ""): status.num_credits})
        for room in status.rooms:
            age = next(name for least, name in reversed(AGES) if room.age_s >= least)
            amounts["pages", age] += room.num_pages
            amounts["tokens", age] += room.num_tokens
            amounts["rooms", room.reason] += 1
            if room.reason is WaitReason.QUARANTINE:
                amounts["quarantined", ""] += room.num_bytes
        self.stats.quarantined_bytes = amounts["quarantined", ""]
        for key, (gauge, labels) in self._held.items():
            gauge.labels(*labels).set(amounts[key])

    def link_up(self, peer: Peer, transport: str) -> None:
        """Count the link immediately, without waiting for the next status."""
        self._set_links({**self.stats.links, str(peer): transport})

    def _set_links(self, links: dict[str, str]) -> None:
        """Set the transport of each link that is up."""
        if links == self.stats.links:
            return
        self.stats.links = links
        counts = Tally(links.values())
        self._linked |= set(counts)
        for transport in self._linked:
            self._metrics.links.labels(self._labels[0], transport).set(counts[transport])

    def thread_stalled(self, thread: str, silent_s: float) -> None:
        """Set the gauge, on the watchdog's thread."""
        self.stats.stalled[thread] = silent_s
        self._metrics.stalled.labels(*self._labels, thread).set(silent_s)

    def thread_broken(self, thread: str) -> None:
        """Count the thread."""
        self.stats.broken[thread] += 1
        self._metrics.broken.labels(*self._labels, thread).inc()

    def close(self) -> None:
        """Remove the gauges of the closed endpoint."""
        metrics = self._metrics
        gone: list[tuple[Gauge, tuple[str, ...]]] = [
            (gauge, self._labels)
            for gauge in (
                metrics.open_rooms,
                metrics.quarantined,
                metrics.staging_used,
                metrics.staging_total,
                metrics.heartbeat_age,
            )
        ]
        gone += self._held.values()
        gone += [(metrics.links, (self._labels[0], transport)) for transport in self._linked]
        gone += [(metrics.stalled, (*self._labels, thread)) for thread in self.stats.stalled]
        for gauge, labels in gone:
            with contextlib.suppress(KeyError):
                gauge.remove(*labels)
