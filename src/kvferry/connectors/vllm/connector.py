"""The connector that vLLM loads: its interface, handed on to the scheduler's or a worker's part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvferry.connectors.vllm.compat import cache_hit_source, check_version
from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.engine import (
    block_groups,
    cache_dtype,
    demand_carriable,
    engine_shape,
    model_name,
    replica_of,
)
from kvferry.connectors.vllm.metadata import DecodeMetadata, PrefillMetadata
from kvferry.connectors.vllm.metrics import KVFerryPromMetrics, KVFerryStats
from kvferry.connectors.vllm.paging import BlockCuts
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.scheduler import ConnectorScheduler
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.stats import no_counts
from kvferry.connectors.vllm.targets import Arrivals
from kvferry.connectors.vllm.worker import ConnectorWorker


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's orders, as they travel to the workers."""

    prefill: PrefillMetadata
    decode: DecodeMetadata


@dataclass
class FailureReasons(KVConnectorWorkerMetadata):
    """Why rooms failed on a rank, as it travels to the scheduler."""

    reasons: dict[str, str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FailureReasons:
        """Of two ranks; the first word counts."""
        assert isinstance(other, FailureReasons)
        return FailureReasons(other.reasons | self.reasons)


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's caches carried by kvferry. See ``docs/connectors/vllm.md``."""

    _cache_hit_source = cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__, KVConnectorBase_V1)
        demand_carriable(vllm_config)
        self._kept = block_groups(vllm_config, kv_cache_config)
        config = self._kv_transfer_config
        settings = read_settings(config.kv_connector_extra_config)
        key = settings.key()
        name = settings.name_of(replica_of(vllm_config))
        model = model_name(vllm_config, settings.model)
        self._arrivals = Arrivals(set(), set(), set(), {})
        if role is KVConnectorRole.SCHEDULER:
            states = {p: g.state for p, g in enumerate(self._kept) if g.state is not None}
            cuts = BlockCuts(vllm_config.cache_config.block_size, states)
            self._scheduler = ConnectorScheduler(
                PrefillScheduler(name, cuts) if config.is_kv_producer else None,
                DecodeScheduler(cuts) if config.is_kv_consumer else None,
                model=model,
                dtype=cache_dtype(vllm_config),
                leaves_last=bool(states) or any(g.window is not None for g in self._kept),
            )
        else:
            self._worker = ConnectorWorker(settings, key, name, model)

    # ------------------------------------------------------------ for the scheduler

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether cached attention is of use where the state after it is not cached: that comes.

        A window that is not cached as far would not.
        """
        return all(group.window is None for group in self._kept)

    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens come from elsewhere, between steps."""
        missing = self._scheduler.missing(request, num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers are told with a step."""
        return StepMetadata(*self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have said."""
        said = connector_output.kv_connector_worker_meta
        self._scheduler.ended(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            said.reasons if isinstance(said, FailureReasons) else {},
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether a finished request's blocks are still read, and what decode is asked with."""
        return self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, where vLLM has several cache groups."""
        return self._scheduler.finished(request)

    # ------------------------------------------------------------ for a worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Make the rank's endpoints."""
        parallel, config = self._vllm_config.parallel_config, self._kv_transfer_config
        stage = get_pp_group().rank_in_group
        rank = stage * parallel.tensor_parallel_size + get_tensor_model_parallel_rank()
        first = next(iter(kv_caches.values()), None)
        on_cpu = isinstance(first, torch.Tensor) and first.device.type == "cpu"
        self._worker.register(
            kv_caches,
            engine_shape(
                *(self._vllm_config, rank), on_cpu=on_cpu, channels_first=is_conv_state_dim_first()
            ),
            self._kept,
            sends=config.is_kv_producer,
            receives=config.is_kv_consumer,
            fails_early=config.kv_load_failure_policy == "fail" and len(self._kept) == 1,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before a step overwrites anything: the first hook of every step that has orders."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.before(kv_connector_metadata.prefill)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Have requests' caches written into their blocks."""
        self._worker.receive(self._orders.decode)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Push some layers of the step's chunks while the others are computed, where that pays."""
        self._worker.computed(self._orders.prefill, layer_name)

    def wait_for_save(self) -> None:
        """Push what the step has computed; its blocks are held until they were read."""
        self._worker.after(self._orders.prefill)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Which requests' blocks are free, or filled."""
        self._arrivals = self._worker.arrivals()
        return KVConnectorTransferResults(
            finished_sending=self._worker.sent(),
            finished_recving=self._arrivals.received,
            failed_recving=self._arrivals.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests that fail before their blocks are free."""
        return self._arrivals.bad_blocks

    def build_connector_worker_meta(self) -> FailureReasons | None:
        """Why rooms failed, for the scheduler."""
        return FailureReasons(self._arrivals.reasons) if self._arrivals.reasons else None

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """What this rank has done since the last step."""
        if self.role is KVConnectorRole.SCHEDULER:
            return None
        counts = self._worker.counts.take()
        return None if counts is None else KVFerryStats(counts)

    def shutdown(self) -> None:
        """End the rank's endpoints."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()

    @property
    def _orders(self) -> StepMetadata:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepMetadata)
        return orders

    # ------------------------------------------------------------ for both

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads before tokens: what is resharded by heads then travels in larger pieces."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """What a rank has counted, out of what travelled."""
        return KVFerryStats(no_counts() if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KVFerryPromMetrics:
        """The same in vLLM's ``/metrics``."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
