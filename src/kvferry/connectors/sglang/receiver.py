"""A room at a decode rank, behind SGLang's receiver interface. Runs on the scheduler's thread.

SGLang creates one per request, lets it find the prefill server, passes pages when it has some, and
polls. Errors fail only this room.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import Incoming, KvferryError, Status
from kvferry.connectors.sglang.managers import DecodeManager, OfferedPages, RoomFailed
from kvferry.connectors.sglang.metadata import decoded
from kvferry.connectors.sglang.prompts import Prompt
from kvferry.connectors.sglang.windows import check_window

log = logging.getLogger("kvferry.connectors.sglang")


class RoomReceiver:
    """Transfer of one request's cache to this rank."""

    supports_host_destination = False
    require_staging = False
    # Prefill ranks that SGLang would wait for; the handle knows itself when its pages are free.
    bootstrap_infos: Sequence[Any] = ()

    def __init__(
        self, mgr: DecodeManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room or 0
        self.abort_notified = False
        self._prefill: str | None = None
        self._prompt: Prompt | None = None
        self._row = -1
        self._handle: Incoming | None = None
        self._filled = False
        self._refusal: str | None = None
        if not bootstrap_room:
            self.fail("a room id must be above 0; SGLang uses 0 for a row that is not filled")

    @property
    def conclude_state(self) -> int | None:
        """The final status; None while the room is open. SGLang reads it."""
        status = self.poll()
        return status if status in (Status.FAILED, Status.DONE) else None

    # ------------------------------------------------------------ requests of SGLang

    def bind_request(self, req: Any, window: int | None = None) -> None:
        """Take the request and SGLang's window; a hook calls it before ``send_metadata``."""
        self._prompt = self.kv_mgr.prompt_of(req)
        try:
            check_window(self.kv_mgr.settings.cache.window, window)
        except KvferryError as error:
            self.fail(str(error))

    def init(self, prefill_dp_rank: int) -> None:
        """Select the prefill server's replica."""
        info = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if info is None:
            self.fail(self.kv_mgr.prefill_info_table.problem(self.bootstrap_addr))
        elif not 0 <= prefill_dp_rank < info.dp_size:
            self.fail(f"replica {prefill_dp_rank} does not exist; prefill has {info.dp_size}")
        else:
            self._prefill = info.names[prefill_dp_rank]

    def send_metadata(
        self,
        kv_indices: Sequence[int] | NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        """Offer pages for the tokens after the cached prefix."""
        self._row = -1 if aux_index is None else aux_index
        if self._refusal is not None:
            return
        view = self.kv_mgr.prefill_info_table.view(self.bootstrap_addr, self._prefill or "")
        if view is None or self._prompt is None:
            self.fail(self.kv_mgr.prefill_info_table.problem(self.bootstrap_addr))
            return
        try:
            pages = np.asarray(kv_indices).tolist()
            self.kv_mgr.check_same_pages(pages, state_indices)
            offer = OfferedPages(
                prefix=decode_prefix_len or 0,
                pages=pages,
                state=self.kv_mgr.state_row(state_indices),
                window=self.kv_mgr.window_indices(state_indices),
            )
            self._handle = self.kv_mgr.receive(self.bootstrap_room, view, self._prompt, offer)
        except KvferryError as error:
            self.fail(str(error))

    # ------------------------------------------------------------ status

    def poll(self) -> int:
        """Return the status; ``Status`` has the numbers of SGLang's ``KVPoll``."""
        if self._refusal is not None:
            return Status.FAILED
        if self._handle is None:
            return Status.CONNECTING if self._prefill is None else Status.WAITING
        if self._handle.status is Status.DONE and not self._filled:
            self._fill(self._handle)
            return self.poll()
        return int(self._handle.status)

    def _fill(self, handle: Incoming) -> None:
        """Write the request's metadata row; SGLang starts decoding when it has the room id."""
        rows = self.kv_mgr.settings.rows
        self._filled = True
        try:
            rows.write(self._row, decoded(handle.metadata, rows.shape, self.bootstrap_room))
        except KvferryError as error:
            self.fail(str(error))

    def fail(self, reason: str) -> None:
        """Fail this room, and tell the prefill server."""
        if self._refusal is None and self._handle is None:
            self._decline()
        self._refusal = self._refusal or reason
        self._abort_handle()

    def _decline(self) -> None:
        view = self.kv_mgr.prefill_info_table.view(self.bootstrap_addr, self._prefill or "")
        if view is None:
            # The prefill server is unknown; its own deadline ends the room there.
            return
        try:
            self.kv_mgr.decline(self.bootstrap_room, view)
        except KvferryError as error:
            log.warning("not-declined room=%r reason=%r", self.bootstrap_room, str(error))

    def failure_exception(self) -> None:
        """Raise the reason of the failure."""
        if self._refusal is not None:
            raise RoomFailed(self.bootstrap_room, self._refusal)
        own = self._handle.failure if self._handle is not None else None
        if own is None:
            raise RoomFailed(self.bootstrap_room, "another rank failed", is_from_another_rank=True)
        raise RoomFailed(self.bootstrap_room, str(own))

    def abort(self) -> None:
        """Abort the room. Its pages are held until no peer can write to them."""
        if self._handle is None:
            table = self.kv_mgr.prefill_info_table
            known = table.get(self.bootstrap_addr) is not None
            self.fail("aborted by SGLang" if known else table.problem(self.bootstrap_addr))
        else:
            self._abort_handle()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Abort after a failure at this or another rank."""
        self._abort_handle()

    def _abort_handle(self) -> None:
        if self._handle is not None:
            self.abort_notified = True
            self._handle.abort()

    def is_abort_release_safe(self) -> bool:
        """Return whether no peer can write to this room's pages any more."""
        return self._handle is None or self._handle.released

    def clear(self) -> None:
        """Release the room's handle; SGLang calls this last."""
        if self._handle is not None:
            self.kv_mgr.forget(self.bootstrap_room, self._handle)
