"""Numbers for Prometheus: one set of metrics per registry, one series per endpoint.

The label ``transport`` is the one that carried, where something was carried or is connected,
and else what the endpoint was told to use, such as ``auto``.
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
from kvferry.telemetry.observer import LoopStatus, ObservedRoom, ObservedWrite, Observer
from kvferry.telemetry.steps import Moment

LABELS = ("endpoint", "transport")
# Counts of a machine: what it has refused, and parcels that did not wait for a credit.
REFUSALS = ("refused", "misdirected", "other-incarnation")
IMPATIENT = "impatient"
KEPT = (LinkState.GREETING, LinkState.UP)
COPY_STAGES = {Moment.GATHERED: "gather", Moment.SCATTERED: "scatter"}


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
        self.writes = counter("writes", "Writes that ended well, by mode", "mode")
        self.bytes = counter("bytes", "Bytes written to peers, by mode", "mode")
        self.pieces = counter("pieces", "Contiguous pieces written, by mode", "mode")
        self.seconds = counter("write_seconds", "Seconds that writes took, by mode", "mode")
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
            "Bytes per second of single writes, by mode",
            (*LABELS, "mode"),
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
class ModeStats:
    """What one mode has carried."""

    writes: int = 0
    num_bytes: int = 0
    pieces: int = 0
    seconds: float = 0.0


@dataclass
class EndpointStats:
    """One endpoint's own counts, for whoever holds it."""

    modes: dict[TransferMode, ModeStats] = field(
        default_factory=lambda: {p: ModeStats() for p in TransferMode}
    )
    rooms: Tally[str] = field(default_factory=Tally)
    refusals: Tally[str] = field(default_factory=Tally)
    broken: Tally[str] = field(default_factory=Tally)
    stalled: dict[str, float] = field(default_factory=dict)
    # The transport of every link that is up, by peer.
    links: dict[str, str] = field(default_factory=dict)
    staging_used_bytes: int = 0


class EndpointMetrics(Observer):
    """One endpoint's series. Belongs to the loop thread."""

    def __init__(
        self, endpoint: str, transport: str, registry: CollectorRegistry | None = None
    ) -> None:
        self._metrics = _metrics_of(REGISTRY if registry is None else registry)
        self._labels = (endpoint, transport)
        self._linked: set[str] = set()
        self._seen: Tally[str] = Tally()
        self.stats = EndpointStats()
        # Bytes that were written to each peer, by mode.
        self.sent: dict[Peer, dict[TransferMode, int]] = {}
        # Looked up once: finding a series costs more than counting in it.
        self._by_mode: dict[tuple[str, TransferMode], list[Counter]] = {}
        self._ends: dict[str, Counter] = {}
        for mode in TransferMode:
            self._counters(transport, mode)
        self._stages: dict[str, Buckets] = {}
        self._rates: dict[tuple[str, TransferMode], Buckets] = {}

    def _counters(self, transport: str, mode: TransferMode) -> list[Counter]:
        """Of what a transport has carried on a mode: writes, bytes, pieces and seconds."""
        found = self._by_mode.get((transport, mode))
        if found is None:
            metrics, labels = self._metrics, (self._labels[0], transport, mode)
            counters = metrics.writes, metrics.bytes, metrics.pieces, metrics.seconds
            found = [counter.labels(*labels) for counter in counters]
            self._by_mode[transport, mode] = found
        return found

    def room_ended(self, room: ObservedRoom, outcome: Outcome) -> None:
        """Count it, and how long it took; at a source, before and after its engine's part."""
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
                self._took("tail", now - room.finished)

    def write(self, job: ObservedWrite, at: float) -> None:
        """Count what was carried, or why it was not."""
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
        self, room: Room, peer: Peer, moment: Moment, at: float, seconds: float, num_bytes: int = 0
    ) -> None:
        """Count how long it took."""
        self._took(COPY_STAGES[moment], seconds)

    def _took(self, stage: str, seconds: float) -> None:
        """A stage of a room, or a part of it, is over."""
        buckets = self._stages.get(stage)
        if buckets is None:
            buckets = self._stages[stage] = self._metrics.stages.series(*self._labels, stage)
        buckets.observe(seconds)

    def refused(self, what: str, times: int = 1) -> None:
        """Count it."""
        self.stats.refusals[what] += times
        self._metrics.refusals.labels(*self._labels, what).inc(times)

    def status(self, status: LoopStatus) -> None:
        """Set the gauges, and add what is new of the machine's counts."""
        metrics, labels = self._metrics, self._labels
        up = [link for link in status.links if link.state is LinkState.UP]
        age_s = max((status.at - link.heard_at for link in up), default=0.0)
        metrics.open_rooms.labels(*labels).set(status.num_open)
        metrics.quarantined.labels(*labels).set(status.num_quarantined)
        metrics.heartbeat_age.labels(*labels).set(age_s)
        if status.staging_bytes:
            self.stats.staging_used_bytes = status.staging_used_bytes
            metrics.staging_used.labels(*labels).set(status.staging_used_bytes)
            metrics.staging_total.labels(*labels).set(status.staging_bytes)
        kept = [link for link in status.links if link.transport and link.state in KEPT]
        self._set_links({str(link.peer): link.transport for link in kept})
        for peer in self.sent.keys() - {link.peer for link in status.links}:
            del self.sent[peer]
        for what in (*REFUSALS, IMPATIENT):
            new = status.counts.get(what, 0) - self._seen[what]
            self._seen[what] += new
            if new and what == IMPATIENT:
                metrics.credit_waits.labels(*labels).inc(new)
            elif new:
                self.refused(what, new)

    def link_up(self, peer: Peer, transport: str) -> None:
        """Count the link at once, before the next status."""
        self._set_links({**self.stats.links, str(peer): transport})

    def _set_links(self, links: dict[str, str]) -> None:
        """The transport of every link that is up, by peer."""
        if links == self.stats.links:
            return
        self.stats.links = links
        counts = Tally(links.values())
        self._linked |= set(counts)
        for transport in self._linked:
            self._metrics.links.labels(self._labels[0], transport).set(counts[transport])

    def thread_stalled(self, thread: str, silent_s: float) -> None:
        """Show how long, on the watchdog's thread."""
        self.stats.stalled[thread] = silent_s
        self._metrics.stalled.labels(*self._labels, thread).set(silent_s)

    def thread_broken(self, thread: str) -> None:
        """Count it."""
        self.stats.broken[thread] += 1
        self._metrics.broken.labels(*self._labels, thread).inc()

    def close(self) -> None:
        """Remove the gauges of an endpoint that is closed."""
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
        gone += [(metrics.links, (self._labels[0], transport)) for transport in self._linked]
        gone += [(metrics.stalled, (*self._labels, thread)) for thread in self.stats.stalled]
        for gauge, labels in gone:
            with contextlib.suppress(KeyError):
                gauge.remove(*labels)
