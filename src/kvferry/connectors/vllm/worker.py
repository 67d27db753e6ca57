"""The worker's part: a rank's caches as pools, and the endpoints over them.

Runs in a worker process, on the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvferry import (
    ClusterKey,
    EventRecorder,
    InputError,
    LayerPushTuner,
    Order,
    SourceEndpoint,
    TargetEndpoint,
)
from kvferry.connectors.states import StatePart
from kvferry.connectors.vllm.caches import (
    BlockGroup,
    CachePlan,
    CacheView,
    EngineShape,
    plan_caches,
)
from kvferry.connectors.vllm.layers import LayerSteps
from kvferry.connectors.vllm.metadata import DecodeMetadata, PrefillMetadata
from kvferry.connectors.vllm.settings import ConnectorSettings
from kvferry.connectors.vllm.sources import PrefillRankRooms
from kvferry.connectors.vllm.stats import RoomCounts
from kvferry.connectors.vllm.targets import Arrivals, DecodeRankRooms


class ConnectorWorker:
    """One rank of one engine, as kvferry's peers see it."""

    def __init__(
        self, settings: ConnectorSettings, key: ClusterKey | None, name: str, model: str
    ) -> None:
        self._settings = settings
        self._key = key
        self._name = name
        self._model = model
        self._marks = EventRecorder(torch.device("cpu"))
        self._sources: PrefillRankRooms | None = None
        self._targets: DecodeRankRooms | None = None
        self._steps = LayerSteps(())
        self._endpoints: list[SourceEndpoint | TargetEndpoint] = []
        self.counts = RoomCounts()

    def register(
        self,
        caches: Mapping[str, torch.Tensor],
        engine: EngineShape,
        kept: Sequence[BlockGroup] = (),
        *,
        sends: bool,
        receives: bool,
        fails_early: bool,
    ) -> None:
        """Make the rank's endpoints over its caches."""
        kept = kept or [BlockGroup(frozenset(caches))]
        distinct = _distinct(caches, kept)
        plan = plan_caches({name: _view(cache) for name, cache in distinct.items()}, engine, kept)
        pools = pools_of(plan, distinct)
        self._marks = EventRecorder(next(iter(distinct.values())).device)
        # The target first: over shm it moves the caches, and the source must know where to.
        if receives:
            target = TargetEndpoint(plan.layout, pools, **self._described(engine.rank))
            self._endpoints.append(target)
            self._targets = DecodeRankRooms(
                target, plan.tables, self.counts, fails_early=fails_early
            )
        if sends:
            source = SourceEndpoint(plan.layout, pools, **self._described(engine.rank))
            self._endpoints.append(source)
            pace = LayerPushTuner(self._settings.layers, plan.layout, engine.rank, self._marks.now)
            self._sources = PrefillRankRooms(source, plan.tables, self.counts, pace)
            self._steps = LayerSteps(plan.names.values())

    def _described(self, rank: int) -> dict[str, Any]:
        """What both kinds of endpoint are told alike."""
        return {
            "name": self._name,
            "rank": rank,
            "model": self._model,
            "transport": self._settings.transport,
            "discovery": self._settings.discovery,
            "key": self._key,
            "config": self._settings.endpoint_config(),
        }

    # ------------------------------------------------------------ steps

    def before(self, orders: PrefillMetadata) -> None:
        """Before a step's forward pass, and before it overwrites anything."""
        if self._sources is not None:
            self._steps.begin()
            self._sources.before(orders)

    def computed(self, orders: PrefillMetadata, name: str) -> None:
        """During a step's forward pass: that cache has been filled, or will be."""
        layer = self._steps.computed(name)
        if self._sources is not None and layer is not None:
            self._sources.computed(orders, layer, self._marks.computed)

    def after(self, orders: PrefillMetadata) -> None:
        """Behind a step's forward pass."""
        if self._sources is not None:
            self._sources.after(orders, self._marks.computed() if orders.pushed else None)

    def receive(self, orders: DecodeMetadata) -> None:
        """Have requests' caches written into their blocks."""
        if self._targets is not None:
            self._targets.take(orders)

    def sent(self) -> set[str]:
        """Requests whose blocks nobody reads any more."""
        return set() if self._sources is None else self._sources.sent()

    def arrivals(self) -> Arrivals:
        """Requests whose blocks nobody writes any more, and why some are not filled."""
        if self._targets is None:
            return Arrivals(set(), set(), set(), {})
        return self._targets.arrivals()

    def close(self) -> None:
        """Abort every room and end the endpoints."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()


def _distinct(caches: Mapping[str, Any], kept: Sequence[BlockGroup]) -> dict[str, torch.Tensor]:
    """Each cache of each group once: layers may share one, and the first of them fills it.

    Groups share memory too, in which each has other blocks.
    """
    found: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    places = {name: place for place, group in enumerate(kept) for name in group.names}
    for name, cache in caches.items():
        if not isinstance(cache, torch.Tensor):
            raise InputError(
                f"vLLM's cache {name!r:.200} is no single tensor, which can't be carried; use the "
                f"vLLM that this connector was written for"
            )
        if cache.device.type not in ("cpu", "cuda"):
            raise InputError(f"caches on {cache.device.type} can't be carried; use a CPU or CUDA")
        if name in places:  # vLLM may leave out of its groups what shares another layer's cache
            found.setdefault((places[name], cache.data_ptr()), (name, cache))
    return dict(found.values())


def _view(cache: torch.Tensor) -> CacheView:
    dtype = str(cache.dtype).removeprefix("torch.")
    return CacheView(tuple(cache.shape), tuple(cache.stride()), dtype)


def pools_of(
    plan: CachePlan, caches: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, dict[int, torch.Tensor]]]:
    """The caches as views that an endpoint takes: group, tensor, layer."""
    pools = {
        group: {plan.tensor: {layer: _pool(plan, caches[name]) for layer, name in layers.items()}}
        for group, layers in plan.names.items()
    }
    for part, layers in plan.states:
        rows = {layer: _rows(part, caches[name]) for layer, name in layers.items()}
        pools.setdefault(part.group, {})[part.tensor] = rows
    return pools


def _rows(part: StatePart, cache: torch.Tensor) -> torch.Tensor:
    """A part of every block's bytes, unit by unit."""
    blocks = cache.flatten(1).view(torch.uint8)
    end = part.first_byte + part.num_units * part.unit_bytes
    return blocks[:, part.first_byte : end].view(-1, part.num_units, part.unit_bytes)


def _pool(plan: CachePlan, cache: torch.Tensor) -> torch.Tensor:
    if plan.tables.paging.whole_pages:
        pages, heads, tokens, content = cache.shape
        cache = cache.view(pages, heads, 1, tokens * content)
    return cache if plan.layout.order is Order.HND else cache.transpose(1, 2)
