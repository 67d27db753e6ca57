"""A room at a prefill rank, under SGLang's own method names. The scheduler's thread owns it.

SGLang makes one for each request, sends its pages chunk by chunk, and polls. What can't be done
fails this room and no other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import KvferryError, Outgoing, Status, Waitable
from kvferry.connectors.sglang.failures import RoomFailed
from kvferry.connectors.sglang.geometry import KV, WINDOW
from kvferry.connectors.sglang.managers import PrefillManager
from kvferry.connectors.sglang.metadata import encoded
from kvferry.connectors.sglang.prompts import Prompt
from kvferry.connectors.sglang.windows import demand_covered, first_kept, window_pages

# The owner's thread ends a room in well under a millisecond; this long only if it hangs.
ABORT_S = 5.0


@dataclass
class TransferMetric:
    """A room's transfer in SGLang's names: what was written for it, first push to last byte."""

    transfer_latency_s: float | None = None
    alloc_latency_s: float | None = None
    transfer_total_bytes: int | None = None


class RoomSender:
    """One request's cache, on its way from this rank."""

    def __init__(
        self,
        mgr: PrefillManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        # SGLang sets it where a chunk was sent before its pages are known to be written.
        self._early_send_wait_event: Waitable | None = None
        self._prompt: Prompt | None = None
        self._row = -1
        self._num_pages = 0
        self._pages_sent: list[int] = []
        # What was given, and of it what was pushed; the pages between wait for the window's.
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

    # ------------------------------------------------------------ what SGLang asks for

    def tell(self, req: Any, window: int | None = None) -> None:
        """Which request this is, and SGLang's window; called by our hook before it is sent."""
        self._prompt = self.kv_mgr.prompt_of(req)
        try:
            demand_covered(self.kv_mgr.settings.cache.window, window)
        except KvferryError as error:
            self._give_up(str(error))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The room is about to be filled: so many pages, and that metadata row."""
        self._num_pages = num_kv_indices
        self._row = -1 if aux_index is None else aux_index

    def pop_decode_prefix_len(self) -> int:
        """Nothing is left out here: what decode has already is not written anyway."""
        return 0

    def get_max_transfer_tokens(self) -> int | None:
        """Chunks may be of any size."""
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """The last one closes the room, be it empty."""
        return num_pages > 0 or last_chunk

    def mark_prefill_complete(self) -> None:
        """Only SGLang's deferred allocation wants to hear it, which is refused."""

    def send(
        self,
        kv_indices: Sequence[int] | NDArray[np.int32],
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """These pages hold the next tokens. The last chunk carries state, be it an empty list."""
        if self._handle is None or self._handle.failure is not None:
            return
        after = self._early_send_wait_event or self.kv_mgr.settings.computed()
        self._early_send_wait_event = None
        pages: list[int] = np.asarray(kv_indices).tolist()
        num_tokens = self._tokens_in(len(pages), num_kv_tokens)
        self._pages_sent += pages
        try:
            last = state_indices is not None or len(self._pages_sent) >= self._num_pages
            self._take(self._handle, pages, num_tokens, after)
            if last:
                self.kv_mgr.demand_same_pages(self._pages_sent, state_indices)
                self._push_window(self._handle, state_indices, after)
                self._close(self._handle, self.kv_mgr.state_row(state_indices), after)
        except KvferryError as error:
            self._give_up(str(error))

    def _tokens_in(self, num_pages: int, given: int | None) -> int:
        """How many tokens a chunk has; whole pages where SGLang did not say."""
        if given is not None:
            return given
        page_tokens = self.kv_mgr.settings.cache.buffers.page_tokens
        most = num_pages * page_tokens
        return (
            most if self._prompt is None else min(most, self._prompt.num_tokens - self._tokens_sent)
        )

    def _take(
        self, handle: Outgoing, pages: list[int], num_tokens: int, after: Waitable | None
    ) -> None:
        """Push a chunk, up to where a window begins: its pages come with the last chunk."""
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
        """All up to there; ``kept`` are the window's pages, none in front of it."""
        first, page_tokens = self._tokens_pushed, self.kv_mgr.settings.cache.buffers.page_tokens
        if end <= first:
            return
        all_given = end == self._tokens_sent
        num_pages = len(self._held) if all_given else end // page_tokens - first // page_tokens
        pages, self._held = self._held[:num_pages], self._held[num_pages:]
        self._tokens_pushed = end
        given: list[int] | dict[str, Sequence[int | None]] = pages
        if self.kv_mgr.settings.cache.window is not None:
            given = {KV: pages, WINDOW: kept or [None] * len(pages)}
        handle.push((first, end), given, after=after)

    def _close(self, handle: Outgoing, state: int | None, after: Waitable | None) -> None:
        """The metadata goes along with every last chunk, whether there is any state or not."""
        rows = self.kv_mgr.settings.rows
        metadata = encoded(rows.read(self._row), rows.shape)
        digest = b"" if self._prompt is None else self._prompt.digest
        tokens = self._tokens_sent
        handle.close(metadata, states=state, tokens=tokens, after=after, digest=digest)

    # ------------------------------------------------------------ how it stands

    def poll(self) -> int:
        """As SGLang counts: our statuses have its numbers."""
        if self._handle is None:
            return Status.FAILED
        status = self._handle.status
        # Until then it is not known how much was carried.
        if status is Status.DONE and not self._handle.released:
            return Status.MOVING
        return int(status)

    def poll_pp_consensus(self) -> int:
        """Of this stage; the stages agree on the lowest."""
        return self.poll()

    def get_transfer_metric(self) -> TransferMetric:
        """What was really written, and in which time."""
        if self._handle is None or self._began is None or self._ended is None:
            return TransferMetric()
        carried = sum(self._handle.carried.values())
        return TransferMetric(self._ended - self._began, None, carried)

    def failure_exception(self) -> None:
        """Raise why it failed. If only another rank's part did, this one's ends here too."""
        if self._handle is None:
            raise RoomFailed(self.bootstrap_room, self._refusal or "the room was never opened")
        own = self._handle.failure
        if own is None:
            self.abort()
            raise RoomFailed(self.bootstrap_room, "another rank failed", is_from_another_rank=True)
        raise RoomFailed(self.bootstrap_room, self._refusal or str(own))

    def abort(self) -> None:
        """Give the room up. SGLang reuses the pages when this returns, so it waits for the end."""
        self._give_up("aborted by SGLang")

    def _give_up(self, why: str) -> None:
        if self._handle is None:
            return
        self._refusal = self._refusal or why
        self._handle.abort()
        try:
            self._handle.wait(ABORT_S)
        except TimeoutError:
            self.kv_mgr.complain(self.bootstrap_room)

    def clear(self) -> None:
        """Nothing is kept of a room that has ended."""
