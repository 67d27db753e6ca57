"""The scheduler's part: vLLM's requests and steps as entries of the two books.

Runs in the engine core, on its thread. Reads attributes of vLLM's objects and imports nothing of
it. Nothing that a client says raises here, because that would end the engine: what can't be used
is logged, and the request is computed as if nobody had asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvferry import InputError, digest_of
from kvferry.connectors.vllm.decode_scheduler import DecodeScheduler
from kvferry.connectors.vllm.metadata import DecodeMetadata, PrefillMetadata
from kvferry.connectors.vllm.params import asked_of_decode, asked_of_prefill
from kvferry.connectors.vllm.prefill_scheduler import PrefillScheduler

log = logging.getLogger("vllm.kvferry")


class ConnectorScheduler:
    """What one engine's scheduler knows of rooms."""

    def __init__(
        self,
        prefill: PrefillScheduler | None,
        decode: DecodeScheduler | None,
        *,
        model: str,
        dtype: str,
        leaves_last: bool = False,
    ) -> None:
        """``leaves_last``: a prompt's last token is computed at decode alone.

        vLLM computes it there in any case, to have the first one of the answer. Where a layer has
        a window, that token sees one further back than the next; where it has recurrent state, the
        state must not have seen it yet.
        """
        self._prefill = prefill
        self._decode = decode
        self._model = model
        self._dtype = dtype
        self._num_left = int(leaves_last)

    # ------------------------------------------------------------ requests come

    def arrived(self, request: Any) -> None:
        """Note what a new request asks for."""
        try:
            self._note_decode(request)
            self._note_prefill(request)
        except InputError as error:
            log.warning("params-refused request=%s reason=%r", request.request_id, str(error))

    def _note_decode(self, request: Any) -> None:
        asked = asked_of_decode(request.kv_transfer_params)
        if self._decode is None or asked is None:
            return
        num_tokens = asked.tokens or request.num_prompt_tokens - self._num_left
        if num_tokens < 1:
            return
        if num_tokens > request.num_prompt_tokens:
            # Not what was computed, or refused before it got here: prefill is told, no more.
            log.warning("prompt-too-short request=%s room=%r", request.request_id, asked.room)
        digest = self._digest(request, num_tokens)
        if not self._decode.begin(request.request_id, asked, num_tokens, digest):
            log.warning("room-taken request=%s room=%r", request.request_id, asked.room)

    def _note_prefill(self, request: Any) -> None:
        asked = asked_of_prefill(request.kv_transfer_params)
        if self._prefill is None or asked is None or not _is_of_ids(request):
            return
        num_tokens = request.num_prompt_tokens - self._num_left
        if num_tokens < 1:
            return
        digest = self._digest(request, num_tokens)
        if not self._prefill.begin(request.request_id, asked.room, num_tokens, digest):
            log.warning("room-taken request=%s room=%r", request.request_id, asked.room)
        elif self._num_left:
            _shorten(request, num_tokens)

    def _digest(self, request: Any, num_tokens: int) -> bytes:
        """Which prompt to which model, as both sides know it."""
        ids = np.asarray((request.prompt_token_ids or [])[:num_tokens], dtype=np.int64)
        adapter = request.lora_request
        pictures = [str(feature.identifier) for feature in request.mm_features]
        return digest_of(
            ids,
            model=self._model,
            dtype=self._dtype,
            adapters=[adapter.lora_name] if adapter else [],
            extra={"salt": request.cache_salt or "", "pictures": "\n".join(pictures)},
        )

    # ------------------------------------------------------------ decode

    def missing(self, request: Any, num_computed: int) -> int:
        """How many tokens of a request come from elsewhere."""
        if self._decode is None or not _is_of_ids(request):
            return 0
        missing = self._decode.missing(request.request_id, num_computed)
        return missing if num_computed + missing <= request.num_prompt_tokens else 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """A request has its blocks."""
        if self._decode is not None:
            self._decode.allocated(request.request_id, num_external, blocks)

    # ------------------------------------------------------------ steps

    def step(self, output: Any) -> tuple[PrefillMetadata, DecodeMetadata]:
        """What all workers are told with this step."""
        if self._prefill is not None:
            for request in output.preempted_req_ids or ():
                self._prefill.preempted(request)
            for request, computed in _scheduled(output):
                if request in self._prefill:
                    end = computed + output.num_scheduled_tokens[request]
                    blocks = output.kv_connector_block_state.get_block_ids(request)
                    self._prefill.scheduled(request, end, blocks)
        return (
            self._prefill.take_metadata() if self._prefill is not None else PrefillMetadata(),
            self._decode.take_metadata() if self._decode is not None else DecodeMetadata(),
        )

    def ended(self, sent: Iterable[str], received: Iterable[str], why: Mapping[str, str]) -> None:
        """What the workers have said: all of them of these requests, one of these failures."""
        for request in sent:
            if self._prefill is not None:
                self._prefill.released(request)
        for request, reason in why.items():
            log.warning("transfer-failed request=%s reason=%r", request, reason)
            if self._decode is not None:
                self._decode.failed(request)
        for request in received:
            if self._decode is not None:
                self._decode.ended(request)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether a request's blocks are still needed, and what decode is to be asked with."""
        if self._decode is not None:
            self._decode.finished(request.request_id)
        if self._prefill is None or request.request_id not in self._prefill:
            return False, None
        return self._prefill.finished(request.request_id)


def _shorten(request: Any, num_tokens: int) -> None:
    """Have no more than so many tokens of a prompt computed, before anything is."""
    del request.prompt_token_ids[num_tokens:]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    request.max_tokens = 1


def _is_of_ids(request: Any) -> bool:
    """Whether token ids are all that there is of a prompt; no digest covers embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _scheduled(output: Any) -> Iterator[tuple[str, int]]:
    """The requests of a step, and how much of each was computed before it."""
    for request in output.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
