"""Scheduler side of the connector: vLLM's requests and steps as prefill and decode requests.

Runs on the engine core's thread, and reads attributes of vLLM's objects without importing vLLM.
Invalid client input must not raise here, because that would end the engine: it is logged, and the
request is computed as if it had no transfer parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvferry import InputError, digest_of, prefix_chain
from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.metadata import DecodeMetadata, PrefillMetadata, PullMetadata
from kvferry.connectors.vllm.params import read_decode_params, read_holder, read_prefill_params
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvferry.connectors.vllm.pulls.pull_scheduler import PullScheduler

log = logging.getLogger("vllm.kvferry")

# Names of the statuses of requests whose answer has no transfer parameters or no reader.
UNANSWERED = ("FINISHED_ABORTED", "FINISHED_ERROR")


class ConnectorScheduler:
    """Rooms of one engine's requests."""

    def __init__(
        self,
        prefill: PrefillScheduler | None,
        decode: DecodeScheduler | None,
        *,
        model: str,
        dtype: str,
        num_left: int = 0,
        waits_when_idle: bool = False,
        instance: str = "",
    ) -> None:
        """``num_left``: how many of a prompt's last tokens only decode computes.

        ``waits_when_idle``: a step that computes nothing may wait a moment, for rooms to end or
        for an answer to leave. It must not in engines that step together.
        """
        self._prefill = prefill
        self._decode = decode
        self._model = model
        self._dtype = dtype
        self._num_left = num_left
        self._waits_when_idle = waits_when_idle
        self._instance = instance
        # vLLM gives the connector its block pool later.
        self.pulls = PullScheduler(1, None, None)

    def add_request(self, request: Any) -> None:
        """Add a new request, if it has transfer parameters."""
        try:
            self._add_to_decode(request)
            self._add_to_prefill(request)
            self._add_to_pulls(request)
        except InputError as error:
            log.warning("params-refused request=%s reason=%r", request.request_id, str(error))

    def _add_to_decode(self, request: Any) -> None:
        params = read_decode_params(request.kv_transfer_params)
        if self._decode is None or params is None:
            return
        num_tokens = params.tokens or request.num_prompt_tokens - self._num_left
        if num_tokens < 1:
            return
        if num_tokens > request.num_prompt_tokens:
            # The prompt was cut after prefill. Nothing is received, but prefill is notified.
            log.warning("prompt-too-short request=%s room=%r", request.request_id, params.room)
        digest = self._digest(request, num_tokens)
        if not self._decode.add_request(request.request_id, params, num_tokens, digest):
            log.warning("room-taken request=%s room=%r", request.request_id, params.room)

    def _add_to_prefill(self, request: Any) -> None:
        params = read_prefill_params(request.kv_transfer_params)
        if self._prefill is None or params is None or not _has_only_token_ids(request):
            return
        num_tokens = request.num_prompt_tokens - self._num_left
        if num_tokens < 1:
            return
        if params.first_token and self._num_left:
            raise InputError(
                "this model's last tokens are computed at decode, so prefill has no first token of "
                "the answer for another engine; use vLLM for decode"
            )
        digest = self._digest(request, num_tokens)
        if not self._prefill.add_request(
            *(request.request_id, params.room, num_tokens, digest), sends_token=params.first_token
        ):
            log.warning("room-taken request=%s room=%r", request.request_id, params.room)
        elif self._num_left:
            _truncate(request, num_tokens)

    def _add_to_pulls(self, request: Any) -> None:
        holder = read_holder(request.kv_transfer_params)
        if holder in (None, self._instance) or self.pulls.asker is None:
            return
        # vLLM does not read its cache for a request that needs every token's logits.
        if _has_only_token_ids(request) and not request.skip_reading_prefix_cache:
            chain = prefix_chain(_ids(request.prompt_token_ids), **self._content(request))
            self.pulls.asker.add_request(request, holder, chain)

    def _digest(self, request: Any, num_tokens: int) -> bytes:
        ids = (request.prompt_token_ids or [])[:num_tokens]
        return digest_of(_ids(ids), **self._content(request))

    def _content(self, request: Any) -> dict[str, Any]:
        """Return what makes a request's cache, besides its tokens."""
        adapter = request.lora_request
        pictures = [str(feature.identifier) for feature in request.mm_features]
        return {
            "model": self._model,
            "dtype": self._dtype,
            "adapters": [adapter.lora_name] if adapter else [],
            "extra": {"salt": request.cache_salt or "", "pictures": "\n".join(pictures)},
        }

    def num_external_tokens(self, request: Any, num_computed: int) -> int | None:
        """Return how many tokens of a request another instance provides; None to be asked again.

        What was pulled counts as cached here.
        """
        if self.pulls.asker is not None and self.pulls.asker.is_pulling(request, num_computed):
            return None
        if self._decode is None or not _has_only_token_ids(request):
            return 0
        num_external = self._decode.num_external_tokens(request.request_id, num_computed)
        if num_external is None:
            return None
        return num_external if num_computed + num_external <= request.num_prompt_tokens else 0

    def blocks_allocated(
        self, request: Any, blocks: Sequence[Sequence[int]], num_external: int
    ) -> None:
        """Start to receive a request's cache into its blocks."""
        if self._decode is not None:
            self._decode.blocks_allocated(request.request_id, num_external, blocks)

    def build_metadata(self, output: Any) -> tuple[PrefillMetadata, DecodeMetadata, PullMetadata]:
        """Return the metadata of a scheduled step."""
        if self._prefill is not None:
            for request_id in output.preempted_req_ids or ():
                self._prefill.preempted(request_id)
            for request_id, num_computed in _scheduled(output):
                if request_id in self._prefill:
                    end = num_computed + output.num_scheduled_tokens[request_id]
                    blocks = output.kv_connector_block_state.get_block_ids(request_id)
                    self._prefill.scheduled(
                        *(request_id, end, blocks), may_repeat=output.has_sync_kv_loads
                    )
        may_wait = self._waits_when_idle and not output.total_num_scheduled_tokens
        return (
            self._prefill.take_metadata(may_wait=may_wait)
            if self._prefill is not None
            else PrefillMetadata(),
            self._decode.take_metadata(may_wait=may_wait)
            if self._decode is not None
            else DecodeMetadata(),
            self.pulls.take_metadata(),
        )

    def transfers_ended(
        self, sent: Iterable[str], received: Iterable[str], reasons: Mapping[str, str]
    ) -> None:
        """Handle results: rooms that all ranks have ended, and failures of single ranks."""
        for request_id in sent:
            if self._prefill is not None:
                self._prefill.released(request_id)
        for request_id, reason in reasons.items():
            log.warning("transfer-failed request=%s reason=%r", request_id, reason)
            if self._decode is not None:
                self._decode.failed(request_id)
        for request_id in received:
            if self._decode is not None:
                self._decode.ended(request_id)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to hold a request's blocks, and the parameters for decode."""
        if self._decode is not None:
            self._decode.request_finished(request.request_id)
        if self.pulls.asker is not None:
            self.pulls.asker.request_finished(request.request_id)
        if self.pulls.holder is not None and _has_only_token_ids(request):
            chain = prefix_chain(_ids(request._all_token_ids), **self._content(request))
            self.pulls.holder.cache.remember(chain, request.block_hashes)
        if self._prefill is None or request.request_id not in self._prefill:
            return False, None
        is_answered = request.status.name not in UNANSWERED
        return self._prefill.request_finished(
            request.request_id,
            is_answered=is_answered,
            token=next(iter(request.output_token_ids), None),
        )


def _ids(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.asarray(tokens, dtype=np.int64)


def _truncate(request: Any, num_tokens: int) -> None:
    """Limit a request to the first ``num_tokens`` tokens of its prompt, before it is scheduled."""
    del request.prompt_token_ids[num_tokens:]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    request.max_tokens = 1


def _has_only_token_ids(request: Any) -> bool:
    """Whether a prompt has no embeddings, which a digest does not cover."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _scheduled(output: Any) -> Iterator[tuple[str, int]]:
    """Yield the requests of a step, with the number of tokens computed before it."""
    for request in output.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
