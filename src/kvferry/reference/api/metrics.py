"""A worker's own figures, for Prometheus, beside those of the endpoints of all its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest

from kvferry.reference.ranks.figures import together
from kvferry.reference.worker.loop import Snapshot


class WorkerMetrics:
    """One worker's figures. Belongs to the HTTP thread."""

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
        """A request has its answer, or the beginning of it."""
        self._requests.labels(self._instance, path, str(status)).inc()

    def text(self, snapshot: Snapshot, others: Sequence[str] = ()) -> str:
        """Everything, in Prometheus' own format. ``others`` are what other processes count."""
        for name, gauge in self._gauges.items():
            gauge.labels(self._instance).set(getattr(snapshot, name))
        for mode, num_bytes in snapshot.carried_bytes.items():
            self._carried.labels(self._instance, mode).set(num_bytes)
        own = generate_latest(self.registry) + generate_latest(REGISTRY)
        return together(own.decode(), others)
