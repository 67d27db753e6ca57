"""Worker side of the connector: a rank's caches as pools, and the endpoints over them.

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
    K,
    V,
    plan_caches,
)
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    PullMetadata,
    RankReport,
    ReceiveRoom,
)
from kvferry.connectors.vllm.pulls.pull_rooms import PulledPrefixes, SentPrefixes
from kvferry.connectors.vllm.settings import ConnectorSettings
from kvferry.connectors.vllm.sources import LayerSteps, PrefillRankRooms
from kvferry.connectors.vllm.stats import RoomCounts
from kvferry.connectors.vllm.targets import Arrivals, DecodeRankRooms

NO_PULLS = PullMetadata()


class ConnectorWorker:
    """Endpoints and rooms of one rank."""

    def __init__(
        self, settings: ConnectorSettings, key: ClusterKey | None, name: str, model: str
    ) -> None:
        self._settings = settings
        self._key = key
        self._name = name
        self._model = model
        self._events = EventRecorder(torch.device("cpu"))
        self._sources: PrefillRankRooms | None = None
        self._targets: DecodeRankRooms | None = None
        self._sent: SentPrefixes | None = None
        self._pulled: PulledPrefixes | None = None
        self._steps = LayerSteps(())
        self._endpoints: list[SourceEndpoint | TargetEndpoint] = []
        self._rests: BlockRests | None = None
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
        zeroes_rest: bool = False,
    ) -> None:
        """Create the rank's endpoints over its caches.

        ``zeroes_rest``: vLLM relies on zeros after a request's last token.
        """
        kept = kept or [BlockGroup(frozenset(caches))]
        distinct = _distinct(caches, kept)
        plan = plan_caches({name: _view(cache) for name, cache in distinct.items()}, engine, kept)
        pools = pools_of(plan, distinct)
        self._events = EventRecorder(next(iter(distinct.values())).device)
        # Create the target first: with shm it moves the caches, and the source uses the result.
        if receives:
            target = TargetEndpoint(plan.layout, pools, **self._endpoint_options(engine.rank))
            self._endpoints.append(target)
            self._targets = DecodeRankRooms(
                target, plan.tables, self.counts, fails_early=fails_early
            )
            deadline_s = self._settings.pull_deadline_s
            self._pulled = PulledPrefixes(target, plan.tables, self.counts, deadline_s)
            if zeroes_rest and not plan.tables.paging.whole_pages:
                self._rests = BlockRests(plan, distinct)
        if sends:
            source = SourceEndpoint(plan.layout, pools, **self._endpoint_options(engine.rank))
            self._endpoints.append(source)
            now = self._events.now
            tuner = LayerPushTuner(self._settings.layers, plan.layout, engine.rank, now)
            self._sources = PrefillRankRooms(source, plan.tables, self.counts, tuner)
            self._steps = LayerSteps(plan.names.values())
            self._sent = SentPrefixes(source, plan.tables, self.counts)
            if engine.rank == plan.layout.lead:
                self._sent.answer_pulls()

    def _endpoint_options(self, rank: int) -> dict[str, Any]:
        return {
            "name": self._name,
            "rank": rank,
            "model": self._model,
            "transport": self._settings.transport,
            "discovery": self._settings.discovery,
            "key": self._key,
            "config": self._settings.rank_config(),
        }

    def begin_step(self, metadata: PrefillMetadata, pulls: PullMetadata = NO_PULLS) -> None:
        """Prepare the sends of a step, before its forward pass overwrites anything."""
        if self._sources is not None:
            self._steps.begin()
            self._sources.begin_step(metadata)
        if self._sent is not None:
            self._send_prefixes()  # Those of a step that had no end.
            self._sent.begin_step(pulls)

    def cache_computed(self, name: str) -> None:
        """Push layers during the forward pass, after the kernels of a cache were launched."""
        if self._sources is None or not self._sources.is_pushing:
            return
        layer = self._steps.computed(name)
        if layer is not None:
            self._sources.layer_computed(layer, self._events.computed)

    def end_step(self, metadata: PrefillMetadata) -> None:
        """Push the rest of a step, after its forward pass."""
        if self._sources is not None:
            computed = self._events.computed() if metadata.pushed else None
            self._sources.end_step(metadata, computed)
            self._send_prefixes()

    def _send_prefixes(self) -> None:
        if self._sent is not None and self._sent.is_waiting:
            self._sent.send(self._events.computed())

    def start_receives(self, metadata: DecodeMetadata, pulls: PullMetadata = NO_PULLS) -> None:
        """Start to receive caches into their blocks."""
        if self._targets is not None:
            for order in metadata.received:
                if self._rests is not None and order.blocks:
                    self._rests.zero(order)
            self._targets.begin_step(metadata)
        if self._pulled is not None:
            self._pulled.begin_step(pulls.asked, pulls.aborted)

    def take_sent(self) -> set[str]:
        """Return the requests whose blocks are not read any more. Each is returned once."""
        return set() if self._sources is None else self._sources.take_sent()

    def take_arrivals(self, *, wait_s: float = 0.0) -> Arrivals:
        """Return the requests whose blocks are not written any more. Each is returned once.

        ``wait_s``: how long to wait for a room to end.
        """
        if self._targets is None:
            return Arrivals(set(), set(), set(), {})
        if wait_s:
            self._targets.wait_for_end(wait_s)
        return self._targets.take_arrivals()

    def take_report(self, reasons: dict[str, str]) -> RankReport:
        """Return what the scheduler must know, besides requests that are sent or received."""
        report = RankReport(reasons)
        if self._sent is not None:
            report.sent.update(self._sent.take_released())
        if self._pulled is not None:
            report.pulled = {name: [num] for name, num in self._pulled.take_pulled().items()}
            report.received.update(self._pulled.take_released())
        return report

    def close(self) -> None:
        """Abort every room and close the endpoints."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()


def _distinct(caches: Mapping[str, Any], kept: Sequence[BlockGroup]) -> dict[str, torch.Tensor]:
    """Return each cache of each group once, under the first of the layers that share it.

    Several groups may share memory, too, but they use different blocks of it.
    """
    found: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}
    places = {name: place for place, group in enumerate(kept) for name in group.names}
    for name, cache in caches.items():
        if not isinstance(cache, torch.Tensor):
            raise InputError(
                f"vLLM's cache {name!r:.200} is no single tensor, which can't be carried; use a "
                f"vLLM version that this connector supports"
            )
        if cache.device.type not in ("cpu", "cuda"):
            raise InputError(f"caches on {cache.device.type} can't be carried; use a CPU or CUDA")
        if name in places:  # vLLM may leave a layer out of its groups if it shares a cache.
            found.setdefault((places[name], cache.data_ptr()), (name, cache))
    return dict(found.values())


class BlockRests:
    """Zeroes what a transfer leaves of a request's last blocks. A transfer writes other bytes.

    vLLM zeroes new blocks of some models, but not those that it expects a transfer to fill.
    """

    def __init__(self, plan: CachePlan, caches: Mapping[str, torch.Tensor]) -> None:
        tables = plan.tables
        self._caches = [
            (
                tables.places[group],
                tables.paging_of(group),
                _token_views(plan, group, caches[name]).values(),
            )
            for group, layers in plan.names.items()
            for name in layers.values()
        ]

    def zero(self, order: ReceiveRoom) -> None:
        """Zero the tokens after a room's last one, on the current stream."""
        for place, paging, views in self._caches:
            for page, used in paging.rest(order.blocks[place], order.tokens).items():
                for view in views:
                    view[page, :, used:] = 0


def _view(cache: torch.Tensor) -> CacheView:
    dtype = str(cache.dtype).removeprefix("torch.")
    return CacheView(tuple(cache.shape), tuple(cache.stride()), dtype)


def pools_of(
    plan: CachePlan, caches: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, dict[int, torch.Tensor]]]:
    """Return views of the caches for an endpoint, by group, tensor and layer."""
    pools: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for group, layers in plan.names.items():
        for layer, name in layers.items():
            for tensor, view in _token_views(plan, group, caches[name]).items():
                pools.setdefault(group, {}).setdefault(tensor, {})[layer] = _pool(plan, view)
    for part, layers in plan.states:
        rows = {layer: _rows(part, caches[name]) for layer, name in layers.items()}
        pools.setdefault(part.group, {})[part.tensor] = rows
    return pools


def _rows(part: StatePart, cache: torch.Tensor) -> torch.Tensor:
    """Return a part of every block as [blocks, units, bytes]."""
    blocks = cache.flatten(1).view(torch.uint8)
    end = part.first_byte + part.num_units * part.unit_bytes
    return blocks[:, part.first_byte : end].view(-1, part.num_units, part.unit_bytes)


def _token_views(plan: CachePlan, group: str, cache: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of a cache by tensor, each as [pages, heads, tokens, content]."""
    pages, heads, tokens, content = cache.shape
    tensors = plan.layout.spec.group(group).tensors
    if plan.tables.paging.whole_pages:
        return {tensors[0].name: cache.view(pages, heads, 1, tokens * content)}
    if len(tensors) == 1:
        return {tensors[0].name: cache}
    if plan.layout.is_transposed(group, K):
        # All columns of a head's K, and behind them the rows of its V.
        width, start = content // 2, cache.storage_offset()
        shape, (page, head, *_) = (pages, heads, tokens, width), cache.stride()
        return {
            K: cache.as_strided(shape, (page, head, 1, tokens), start),
            V: cache.as_strided(shape, (page, head, width, 1), start + tokens * width),
        }
    if group in plan.layout.packed:
        k, v = cache.split(content // 2, dim=-1)
        return {K: k, V: v}
    # Index keys, of which a page has one tensor after the other.
    found, first = {}, cache.storage_offset()
    for tensor in tensors:
        width = tensor.elements
        shape, strides = (pages, 1, tokens, width), (cache.stride(0), tokens * width, width, 1)
        found[tensor.name] = cache.as_strided(shape, strides, first)
        first += tokens * width
    return found


def _pool(plan: CachePlan, cache: torch.Tensor) -> torch.Tensor:
    return cache if plan.layout.order is Order.HND else cache.transpose(1, 2)
