"""Prometheus metrics of a worker, beside those of rank 0's endpoint."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest

from kvferry.reference.worker.running import Snapshot


class WorkerMetrics:
    """The metrics of one worker. Belongs to the HTTP thread."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_serve_{name}", text, ("instance", *labels), registry=registry)

        self._gauges = {
            "running": gauge("running", "Requests with pages"),
            "waiting": gauge("waiting", "Requests without pages"),
            "rooms": gauge("rooms", "Requests whose pages a transfer may touch"),
            "free_tokens": gauge("free_tokens", "Tokens that new requests could get pages for"),
        }
        self._carried = gauge("carried_bytes", "Bytes that all ranks have sent, by mode", "mode")
        self._requests = Counter(
            "kvferry_serve_requests",
            "Requests answered, by path and status",
            ("instance", "path", "status"),
            registry=registry,
        )

    def answered(self, path: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(self._instance, path, str(status)).inc()

    def text(self, snapshot: Snapshot) -> bytes:
        """Return all metrics of this process in Prometheus' text format."""
        for name, gauge in self._gauges.items():
            gauge.labels(self._instance).set(getattr(snapshot, name))
        for mode, num_bytes in snapshot.carried_bytes.items():
            self._carried.labels(self._instance, mode).set(num_bytes)
        return generate_latest(self.registry) + generate_latest(REGISTRY)
