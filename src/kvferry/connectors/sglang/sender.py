"""A room at a prefill rank, behind SGLang's sender interface. Runs on the scheduler's thread.

SGLang creates one per request, sends its pages chunk by chunk, and polls. Errors fail only this
room.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import KvferryError, Outgoing, Status, Waitable
from kvferry.connectors.sglang.geometry import KV, WINDOW
from kvferry.connectors.sglang.managers import PrefillManager, RoomFailed
from kvferry.connectors.sglang.metadata import encoded
from kvferry.connectors.sglang.prompts import Prompt
from kvferry.connectors.sglang.windows import check_window, first_kept, window_pages

# The loop ends a room in less than a millisecond, unless it hangs.
ABORT_S = 5.0


@dataclass
class TransferMetric:
    """SGLang's metrics of a transfer: bytes written, and time from first push to last byte."""

    transfer_latency_s: float | None = None
    alloc_latency_s: float | None = None
    transfer_total_bytes: int | None = None


class RoomSender:
    """Transfer of one request's cache from this rank."""

    def __init__(
        self,
        mgr: PrefillManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
        **_: Any,
    ) -> None:
        # SGLang 0.5.21 also passes ranks, which the layout has.
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        # SGLang sets it if it sends a chunk before the kernels have written its pages.
        self._early_send_wait_event: Waitable | None = None
        self._prompt: Prompt | None = None
        self._row = -1
        self._num_pages = 0
        self._pages_sent: list[int] = []
        # Tokens that SGLang has sent, and those pushed; the pages between wait for window pages.
        self._tokens_sent = 0
        self._tokens_pushed = 0
        self._held: list[int] = []
        self._began: float | None = None
        self._ended: float | None = None
        self._refusal = mgr.refusal(bootstrap_room, named=req_has_disagg_prefill_dp_rank)
        self._handle: Outgoing | None = None if self._refusal else self._open()

    def _open(self) -> Outgoing | None:
        try:
            handle = self.kv_mgr.open(self.bootstrap_room)
        except KvferryError as error:
            self._refusal = str(error)
            return None
        handle.on_end(lambda _: self._note_end())
        return handle

    def _note_end(self) -> None:
        self._ended = time.monotonic()

    # ------------------------------------------------------------ requests of SGLang

    def bind_request(self, req: Any, window: int | None = None) -> None:
        """Take the request and SGLang's window; the plugin's hook calls it before ``send``."""
        self._prompt = self.kv_mgr.prompt_of(req)
        try:
            check_window(self.kv_mgr.settings.cache.window, window)
        except KvferryError as error:
            self._abort(str(error))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Take the number of pages and the metadata row."""
        self._num_pages = num_kv_indices
        self._row = -1 if aux_index is None else aux_index

    def pop_decode_prefix_len(self) -> int:
        """Return 0: SGLang passes all pages, and kvferry skips what decode has cached."""
        return 0

    def get_max_transfer_tokens(self) -> int | None:
        """Return None: chunks may have any size."""
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Return whether to send a chunk: also an empty one if it is the last."""
        return num_pages > 0 or last_chunk

    def mark_prefill_complete(self) -> None:
        """Do nothing: it serves deferred allocation, which is not supported."""

    def send(
        self,
        kv_indices: Sequence[int] | NDArray[np.int32],
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Push the next tokens' pages. The last chunk has ``state_indices``, possibly empty."""
        if self._handle is None or self._handle.failure is not None:
            return
        after = self._early_send_wait_event or self.kv_mgr.settings.record_event()
        self._early_send_wait_event = None
        pages: list[int] = np.asarray(kv_indices).tolist()
        num_tokens = self._tokens_in(len(pages), num_kv_tokens)
        self._pages_sent += pages
        try:
            last = state_indices is not None or len(self._pages_sent) >= self._num_pages
            self._add_chunk(self._handle, pages, num_tokens, after)
            if last:
                self.kv_mgr.check_same_pages(self._pages_sent, state_indices)
                self._push_window(self._handle, state_indices, after)
                self._close(self._handle, self.kv_mgr.state_row(state_indices), after)
        except KvferryError as error:
            self._abort(str(error))

    def _tokens_in(self, num_pages: int, given: int | None) -> int:
        """Return a chunk's number of tokens; whole pages if SGLang does not report it."""
        if given is not None:
            return given
        most = num_pages * self.kv_mgr.settings.cache.listed_page_tokens
        return (
            most if self._prompt is None else min(most, self._prompt.num_tokens - self._tokens_sent)
        )

    def _add_chunk(
        self, handle: Outgoing, pages: list[int], num_tokens: int, after: Waitable | None
    ) -> None:
        """Push a chunk up to the window, whose pages come with the last chunk."""
        if num_tokens <= 0:
            return
        if self._began is None:
            self._began = time.monotonic()
        self._tokens_sent += num_tokens
        self._held += pages
        window = self.kv_mgr.settings.cache.window
        if window is None:
            self._push(handle, self._tokens_sent, [], after)
        elif self._prompt is not None:
            end = min(self._tokens_sent, first_kept(window, self._prompt.num_tokens))
            self._push(handle, end, [], after)

    def _push_window(
        self, handle: Outgoing, state_indices: Sequence[Any] | None, after: Waitable | None
    ) -> None:
        window = self.kv_mgr.settings.cache.window
        if window is not None:
            named = self.kv_mgr.window_indices(state_indices)
            kept = window_pages(window, named, self._tokens_sent)
            self._push(handle, self._tokens_sent, kept, after)

    def _push(self, handle: Outgoing, end: int, kept: list[int], after: Waitable | None) -> None:
        """Push all tokens before ``end``; ``kept`` are the pages of the window, empty before it."""
        cache, first = self.kv_mgr.settings.cache, self._tokens_pushed
        page_tokens = cache.listed_page_tokens
        if end <= first:
            return
        all_given = end == self._tokens_sent
        num_pages = len(self._held) if all_given else end // page_tokens - first // page_tokens
        pages, self._held = self._held[:num_pages], self._held[num_pages:]
        self._tokens_pushed = end
        pages = cache.own_pages(pages, first, end)
        given: list[int] | dict[str, Sequence[int | None]] = pages
        if cache.window is not None:
            given = {KV: pages, WINDOW: kept or [None] * len(pages)}
        handle.push((first, end), given, after=after)

    def _close(self, handle: Outgoing, state: int | None, after: Waitable | None) -> None:
        """Close the room with its metadata."""
        rows = self.kv_mgr.settings.rows
        metadata = encoded(rows.read(self._row), rows.shape)
        digest = b"" if self._prompt is None else self._prompt.digest
        tokens = self._tokens_sent
        handle.close(metadata, states=state, tokens=tokens, after=after, digest=digest)

    # ------------------------------------------------------------ status

    def poll(self) -> int:
        """Return the status; ``Status`` has the numbers of SGLang's ``KVPoll``."""
        if self._handle is None:
            return Status.FAILED
        status = self._handle.status
        # The number of bytes is known only after the release.
        if status is Status.DONE and not self._handle.released:
            return Status.MOVING
        return int(status)

    def poll_pp_consensus(self) -> int:
        """Return this stage's status; SGLang takes the lowest of all stages."""
        return self.poll()

    def get_transfer_metric(self) -> TransferMetric:
        """Return the bytes written, and the time they took."""
        if self._handle is None or self._began is None or self._ended is None:
            return TransferMetric()
        carried = sum(self._handle.carried.values())
        return TransferMetric(self._ended - self._began, None, carried)

    def failure_exception(self) -> None:
        """Raise the reason of the failure. If only another rank failed, abort here too."""
        if self._handle is None:
            raise RoomFailed(self.bootstrap_room, self._refusal or "the room was never opened")
        own = self._handle.failure
        if own is None:
            self.abort()
            raise RoomFailed(self.bootstrap_room, "another rank failed", is_from_another_rank=True)
        raise RoomFailed(self.bootstrap_room, self._refusal or str(own))

    def abort(self) -> None:
        """Abort the room and wait for its end, because SGLang reuses the pages afterwards."""
        self._abort("aborted by SGLang")

    def _abort(self, reason: str) -> None:
        if self._handle is None:
            return
        self._refusal = self._refusal or reason
        self._handle.abort()
        try:
            self._handle.wait(ABORT_S)
        except TimeoutError:
            self.kv_mgr.log_not_ended(self.bootstrap_room)

    def clear(self) -> None:
        """Do nothing: an ended room holds no resources."""
