"""The service's own metrics: counts, and no names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvferry.discovery.registry import InstanceRegistry
from kvferry.discovery.waiters import Waiters


class DiscoveryMetrics:
    """What one service counts, in a collection of its own."""

    def __init__(self, registry: InstanceRegistry, waiters: Waiters) -> None:
        self.collection = CollectorRegistry()
        self.requests = Counter(
            "kvferry_discovery_requests",
            "Requests, by route and status",
            ["route", "status"],
            registry=self.collection,
        )
        self.expired = Counter(
            "kvferry_discovery_expired_leases",
            "Ranks whose lease ended without a farewell",
            registry=self.collection,
        )
        self._gauge("instances", "Instances of which any rank is registered").set_function(
            lambda: registry.num_instances
        )
        self._gauge("complete_instances", "Instances that can be used").set_function(
            lambda: registry.num_complete
        )
        self._gauge("ranks", "Registered ranks").set_function(lambda: registry.num_records)
        self._gauge("waiting_requests", "Requests that wait for news").set_function(
            lambda: waiters.num_waiting
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"kvferry_discovery_{name}", text, registry=self.collection)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.collection)
