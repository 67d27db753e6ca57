"""Prometheus metrics of the discovery service. They are counts and contain no names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvferry.discovery.http.waiters import Waiters
from kvferry.discovery.registry import InstanceRegistry


class DiscoveryMetrics:
    """The metrics of one service, in a registry of their own."""

    def __init__(self, instances: InstanceRegistry, waiters: Waiters) -> None:
        self.collection = CollectorRegistry()
        self.requests = Counter(
            "kvferry_discovery_requests",
            "Requests by route and response status",
            ["route", "status"],
            registry=self.collection,
        )
        self.expired = Counter(
            "kvferry_discovery_expired_leases",
            "Ranks whose lease expired",
            registry=self.collection,
        )
        self._gauge("instances", "Instances with any registered rank").set_function(
            lambda: instances.num_instances
        )
        self._gauge("complete_instances", "Complete instances").set_function(
            lambda: instances.num_complete
        )
        self._gauge("ranks", "Registered ranks").set_function(lambda: instances.num_records)
        self._gauge("waiting_requests", "Requests that wait for a change").set_function(
            lambda: waiters.num_waiting
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"kvferry_discovery_{name}", text, registry=self.collection)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.collection)
