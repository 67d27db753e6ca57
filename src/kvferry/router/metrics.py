"""Prometheus metrics of the router."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.conversations import PrefillReport
from kvferry.router.upstream import AttemptOutcome, OpenResponse
from kvferry.router.worker_pool import WorkerPool, WorkerRole

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RouterMetrics:
    """Metrics of one router, in a registry of its own."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_router_requests",
            "Requests of clients; status 499 means that the client left",
            ["path", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvferry_router_request_seconds",
            "Seconds from a request to the end of its response",
            ["path"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._attempts = Counter(
            "kvferry_router_attempts",
            "Attempts at workers, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.first_tokens = Counter(
            "kvferry_router_first_tokens_from_prefill",
            "Streams whose first token came from prefill",
            registry=self.registry,
        )
        self.moves = Histogram(
            "kvferry_router_move_seconds",
            "Seconds for which a stream paused until another worker sent its rest",
            ["reason"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.prefixes = Counter(
            "kvferry_router_prefixes",
            "Prompts sent to prefill, by the decision about a prefix that another instance holds",
            ["decision"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvferry_router_prompt_tokens",
            "Tokens of prompts that prefill workers report, by where their cache came from",
            ["source"],
            registry=self.registry,
        )
        self.remembered = Gauge(
            "kvferry_router_remembered_pieces",
            "Pieces of conversations whose holder the router remembers",
            registry=self.registry,
        )
        self.queued = Gauge(
            "kvferry_router_queued",
            "Requests that wait for a worker that is not full",
            registry=self.registry,
        )
        self._workers = Gauge(
            "kvferry_router_workers",
            "Known workers",
            ["role", "state"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "kvferry_router_in_flight",
            "Requests of this router in flight at workers",
            ["role"],
            registry=self.registry,
        )

    def attempt(self, outcome: AttemptOutcome) -> None:
        """Count one attempt."""
        kind = (
            "answered" if isinstance(outcome, OpenResponse) else outcome.fault_domain.name.lower()
        )
        self._attempts.labels(kind).inc()

    def count_prompt(self, usage: PrefillReport.Usage, own: PrefillReport.Own | None) -> None:
        """Count the tokens of a prompt that a prefill worker has computed, had, or pulled."""
        pulled = own.pulled if own else 0
        for source, num_tokens in (
            ("computed", usage.prompt_tokens - usage.cached_tokens),
            ("cached", usage.cached_tokens - pulled),
            ("pulled", pulled),
        ):
            self.prompt_tokens.labels(source).inc(max(0, num_tokens))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for role in WorkerRole:
            workers = [worker for worker in self._pool.workers if worker.role is role]
            num_up = sum(worker.up for worker in workers)
            self._workers.labels(role, "up").set(num_up)
            self._workers.labels(role, "down").set(len(workers) - num_up)
            self._in_flight.labels(role).set(sum(worker.in_flight for worker in workers))
        return generate_latest(self.registry)
