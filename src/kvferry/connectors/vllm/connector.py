"""The connector class that vLLM loads. It forwards vLLM's hooks to the scheduler or worker side."""

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
from vllm.distributed.parallel_state import (
    get_pcp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.core.sched.output import SchedulerOutput

from kvferry.connectors.vllm.compat import cache_hit_source, check_version, engine_waker
from kvferry.connectors.vllm.cpu_pages import has_columns
from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.engine import (
    block_groups,
    block_selector,
    cache_dtype,
    engine_shape,
    fingerprint,
    keeps_all_tokens,
    num_left_to_decode,
    num_workers,
    replica_index,
    shared_block_tokens,
)
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    PullMetadata,
    RankReport,
)
from kvferry.connectors.vllm.metrics import KVFerryStats, MetricHooks
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.pulls.lookup_channel import LookupServer
from kvferry.connectors.vllm.pulls.prefix_cache import PrefixCache, can_find
from kvferry.connectors.vllm.pulls.pull_scheduler import PrefixAsker, PrefixHolder, PullScheduler
from kvferry.connectors.vllm.scheduler import ConnectorScheduler
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.targets import Arrivals
from kvferry.connectors.vllm.worker import ConnectorWorker


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Metadata of one step for all workers."""

    prefill: PrefillMetadata
    decode: DecodeMetadata
    pulls: PullMetadata


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Report of one rank or several to the scheduler."""

    own: RankReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return the report of both."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.own.plus(other.own))


class KVFerryConnector(MetricHooks, KVConnectorBase_V1, SupportsHMA):
    """Transfers vLLM's KV caches with kvferry. See ``docs/connectors/vllm.md``."""

    _cache_hit_source = cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__, KVConnectorBase_V1, SchedulerOutput)
        self._groups = block_groups(vllm_config, kv_cache_config)
        config = self._kv_transfer_config
        settings = read_settings(config.kv_connector_extra_config)
        key = settings.key()
        name = settings.instance_name(replica_index(vllm_config))
        model = fingerprint(vllm_config, settings.model)
        self._arrivals = Arrivals(set(), set(), set(), {})
        self._report = RankReport()
        if role is KVConnectorRole.SCHEDULER:
            selector = block_selector(vllm_config, self._groups)
            self._scheduler = ConnectorScheduler(
                PrefillScheduler(name, selector) if config.is_kv_producer else None,
                DecodeScheduler(selector, settings.max_rooms, settings.max_tokens)
                if config.is_kv_consumer
                else None,
                model=model,
                dtype=cache_dtype(vllm_config),
                num_left=num_left_to_decode(vllm_config, self._groups),
                # The replicas of a model with experts step together.
                waits_when_idle=vllm_config.parallel_config.data_parallel_size == 1,
                instance=name,
            )
        else:
            self._worker = ConnectorWorker(settings, key, name, model)

    # ------------------------------------------------------------ scheduler side

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether vLLM may use cached attention without the recurrent state after it.

        The state is transferred. Window layers that are not cached as far are not supported.
        """
        return all(group.window is None for group in self._groups)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Let other instances pull from vLLM's prefix cache, and requests pull into it."""
        block_tokens = shared_block_tokens(self._vllm_config)
        if not keeps_all_tokens(self._groups) or not can_find(gpu_block_pool, block_tokens):
            return
        cache = PrefixCache(gpu_block_pool, block_tokens)
        num_ranks = num_workers(self._vllm_config)
        wake = engine_waker() if self._kv_transfer_config.is_kv_producer else None
        self._scheduler.pulls = PullScheduler(
            num_ranks,
            PrefixHolder(cache, LookupServer(wake)) if wake is not None else None,
            PrefixAsker(cache, num_ranks) if self._kv_transfer_config.is_kv_consumer else None,
        )

    def has_pending_push_work(self) -> bool:
        """Return whether look-ups or pulls need a step, although no request may."""
        return self._scheduler.pulls.needs_step()

    def on_new_request(self, request: Any) -> None:
        """Add a request with transfer parameters."""
        self._scheduler.add_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens another instance provides, asynchronously; None: ask again."""
        num_external = self._scheduler.num_external_tokens(request, num_computed_tokens)
        return num_external, bool(num_external)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start to receive a request's cache into its blocks."""
        self._scheduler.blocks_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return a step's metadata for the workers."""
        return StepMetadata(*self._scheduler.build_metadata(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Handle the workers' results."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.own if isinstance(meta, WorkerReport) else RankReport()
        self._scheduler.transfers_ended(
            connector_output.finished_sending or (),
            connector_output.finished_recving or (),
            report.reasons,
        )
        self._scheduler.pulls.report(report)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return the cache groups that a transfer fills: all, also those no prefix cache holds."""
        return tuple(range(len(self._groups)))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to hold a finished request's blocks, and the parameters for decode."""
        return self._scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as ``request_finished``, for several cache groups."""
        return self._scheduler.request_finished(request)

    # ------------------------------------------------------------ worker side

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Create the rank's endpoints."""
        parallel, config = self._vllm_config.parallel_config, self._kv_transfer_config
        group = get_pp_group().rank_in_group * parallel.prefill_context_parallel_size
        group += get_pcp_group().rank_in_group
        rank = group * parallel.tensor_parallel_size + get_tensor_model_parallel_rank()
        first = next(iter(kv_caches.values()), None)
        on_cpu = isinstance(first, torch.Tensor) and first.device.type == "cpu"
        kept_as = self._vllm_config.cache_config.cache_dtype
        of_states = {n for group in self._groups if group.state is not None for n in group.names}
        attention = [cache for name, cache in kv_caches.items() if name not in of_states]
        self._worker.register(
            kv_caches,
            engine_shape(
                *(self._vllm_config, rank),
                on_cpu=on_cpu,
                channels_first=is_conv_state_dim_first(),
                has_columns=on_cpu and all(has_columns(cache, kept_as) for cache in attention),
            ),
            self._groups,
            sends=config.is_kv_producer,
            receives=config.is_kv_consumer,
            fails_early=config.kv_load_failure_policy == "fail" and len(self._groups) == 1,
            zeroes_rest=self._kv_cache_config.needs_kv_cache_zeroing,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Prepare a step. vLLM calls this hook first, before anything is overwritten."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.begin_step(kv_connector_metadata.prefill, kv_connector_metadata.pulls)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start to receive caches into their blocks."""
        self._worker.start_receives(self._metadata.decode, self._metadata.pulls)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because caches are received between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Push computed layers while the others are computed, if that is worthwhile."""
        self._worker.cache_computed(layer_name)

    def wait_for_save(self) -> None:
        """Push the rest of the step. Its blocks are held until they were read."""
        self._worker.end_step(self._metadata.prefill)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose blocks are free again or filled."""
        self._arrivals = self._worker.take_arrivals(wait_s=self._metadata.decode.wait_s)
        # Before vLLM takes the statistics: no step may follow soon.
        self._report = self._worker.take_report(self._arrivals.reasons)
        return KVConnectorTransferResults(
            finished_sending=self._worker.take_sent(),
            finished_recving=self._arrivals.received,
            failed_recving=self._arrivals.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed requests, before these blocks are free."""
        return self._arrivals.bad_blocks

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return why rooms failed on this rank, and what has become of pulls."""
        return WorkerReport(self._report) if self._report else None

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """Return this rank's statistics since the last call."""
        if self.role is KVConnectorRole.SCHEDULER:
            return None
        counts = self._worker.counts.take()
        return None if counts is None else KVFerryStats(counts)

    def shutdown(self) -> None:
        """Close the rank's endpoints."""
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()

    @property
    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # ------------------------------------------------------------ both sides

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Prefer heads before tokens, so that resharding by heads moves larger pieces."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"
