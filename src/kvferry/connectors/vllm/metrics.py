"""Metrics of the connector in vLLM's log line and ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.connectors.vllm.stats import (
    DONE,
    FAILED,
    SECONDS,
    SENT_BYTES,
    add_counts,
    is_nothing,
    no_counts,
    shown_counts,
)

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTERS = {
    DONE: "Rooms that ended well on a rank of this engine.",
    FAILED: "Rooms that failed on a rank of this engine.",
    SENT_BYTES: "Bytes that this engine's ranks have written to decode.",
}


@dataclass
class KVFerryStats(KVConnectorStats):
    """Statistics as vLLM aggregates and logs them."""

    data: dict[str, Any] = field(default_factory=no_counts)

    def reset(self) -> None:
        """Reset the statistics."""
        self.data = no_counts()

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        """Return the sum of both statistics."""
        return KVFerryStats(add_counts(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return the values for the log line."""
        return shown_counts(self.data)

    def is_empty(self) -> bool:
        """Whether the statistics are empty."""
        return is_nothing(self.data)


class MetricHooks:
    """Hooks by which vLLM's front end makes the connector's statistics and metrics."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """Return statistics from their serialized form."""
        return KVFerryStats(no_counts() if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KVFerryPromMetrics:
        """Return the metrics for vLLM's ``/metrics``."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """The ``vllm:kvferry_*`` metrics, one series per engine of the server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:kvferry_{name}", documentation=text, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        self._seconds = create_metric_per_engine(
            self._histogram_cls(
                name="vllm:kvferry_receive_seconds",
                documentation="From asking for a prompt's cache to having it, per rank.",
                buckets=list(BUCKETS_S),
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the statistics of an engine's ranks."""
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data[name])
        for seconds in transfer_stats_data[SECONDS]:
            self._seconds[engine_idx].observe(seconds)
