"""The router's metrics, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.upstream import Failed, Opened
from kvferry.router.worker_pool import WorkerPool, WorkerRole

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RouterMetrics:
    """Counters of one router, in a registry of its own."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_router_requests",
            "Requests of clients by path and status; 499 is a client that left.",
            ["path", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvferry_router_seconds",
            "From a request to the end of its answer.",
            ["path"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._attempts = Counter(
            "kvferry_router_attempts",
            "Attempts by how they went: answered, or what failed.",
            ["outcome"],
            registry=self.registry,
        )
        self._workers = Gauge(
            "kvferry_router_workers",
            "Workers that are known.",
            ["part", "state"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "kvferry_router_in_flight",
            "Requests of this router that workers are busy with.",
            ["part"],
            registry=self.registry,
        )

    def attempt(self, outcome: Opened | Failed) -> None:
        """Count one attempt."""
        kind = "answered" if isinstance(outcome, Opened) else outcome.fault_domain.name.lower()
        self._attempts.labels(kind).inc()

    def text(self) -> bytes:
        """All of them, with the workers of this moment."""
        for part in WorkerRole:
            workers = [worker for worker in self._pool.workers if worker.part is part]
            num_up = sum(worker.up for worker in workers)
            self._workers.labels(part, "up").set(num_up)
            self._workers.labels(part, "down").set(len(workers) - num_up)
            self._in_flight.labels(part).set(sum(worker.in_flight for worker in workers))
        return generate_latest(self.registry)
