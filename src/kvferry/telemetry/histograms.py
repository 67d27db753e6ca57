"""Histograms that cost their owner's thread a look-up and an addition; Prometheus reads them.

``prometheus_client``'s own cost several times as much for every value, which is too much for
what is counted for every write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
RATES = (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)


class Buckets:
    """One series. Belongs to one thread, which counts; another may read meanwhile."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def told(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each bound with all that lies below it."""
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class HistogramTable:
    """One metric of a registry: a series for each set of labels that was ever counted."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        bounds: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._series: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def series(self, *labels: str) -> Buckets:
        """The series with those labels, to be kept by who counts in it."""
        return self._series.setdefault(labels, Buckets(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For Prometheus, on its own thread."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, buckets in list(self._series.items()):
            family.add_metric(labels, buckets.told(), buckets.total)
        yield family
