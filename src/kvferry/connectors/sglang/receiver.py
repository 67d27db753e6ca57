"""A room at a decode rank, under SGLang's own method names. The scheduler's thread owns it.

SGLang makes one for each request, has it find the prefill server, gives it pages once it has
some, and polls. What can't be done fails this room and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry import Incoming, KvferryError, Status
from kvferry.connectors.sglang.failures import RoomFailed
from kvferry.connectors.sglang.managers import DecodeManager, Offered
from kvferry.connectors.sglang.metadata import decoded
from kvferry.connectors.sglang.prompts import Prompt
from kvferry.connectors.sglang.windows import demand_covered

log = logging.getLogger("kvferry.connectors.sglang")


class RoomReceiver:
    """One request's cache, on its way to this rank."""

    supports_host_destination = False
    require_staging = False
    # Whom SGLang would wait for; the handle itself knows when its pages are free.
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
            self.refuse("a room is a number above 0; SGLang takes 0 for a row that is not filled")

    @property
    def conclude_state(self) -> int | None:
        """As SGLang reads it: None while nothing is decided."""
        status = self.poll()
        return status if status in (Status.FAILED, Status.DONE) else None

    # ------------------------------------------------------------ what SGLang asks for

    def tell(self, req: Any, window: int | None = None) -> None:
        """Which request this is, and SGLang's window; called by our hook before pages are."""
        self._prompt = self.kv_mgr.prompt_of(req)
        try:
            demand_covered(self.kv_mgr.settings.cache.window, window)
        except KvferryError as error:
            self.refuse(str(error))

    def init(self, prefill_dp_rank: int) -> None:
        """Of the prefill server's replicas, it is that one."""
        info = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if info is None:
            self.refuse(self.kv_mgr.prefill_info_table.problem(self.bootstrap_addr))
        elif not 0 <= prefill_dp_rank < info.dp_size:
            self.refuse(f"there is no replica {prefill_dp_rank}; prefill has {info.dp_size}")
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
        """Offer these pages, those behind the prefix that is cached here."""
        self._row = -1 if aux_index is None else aux_index
        if self._refusal is not None:
            return
        view = self.kv_mgr.prefill_info_table.view(self.bootstrap_addr, self._prefill or "")
        if view is None or self._prompt is None:
            self.refuse(self.kv_mgr.prefill_info_table.problem(self.bootstrap_addr))
            return
        try:
            pages = np.asarray(kv_indices).tolist()
            self.kv_mgr.demand_same_pages(pages, state_indices)
            offer = Offered(
                prefix=decode_prefix_len or 0,
                pages=pages,
                state=self.kv_mgr.state_row(state_indices),
                window=self.kv_mgr.window_indices(state_indices),
            )
            self._handle = self.kv_mgr.receive(self.bootstrap_room, view, self._prompt, offer)
        except KvferryError as error:
            self.refuse(str(error))

    # ------------------------------------------------------------ how it stands

    def poll(self) -> int:
        """As SGLang counts: our statuses have its numbers."""
        if self._refusal is not None:
            return Status.FAILED
        if self._handle is None:
            return Status.CONNECTING if self._prefill is None else Status.WAITING
        if self._handle.status is Status.DONE and not self._filled:
            self._fill(self._handle)
            return self.poll()
        return int(self._handle.status)

    def _fill(self, handle: Incoming) -> None:
        """The request's metadata row: SGLang begins when its room is there."""
        rows = self.kv_mgr.settings.rows
        self._filled = True
        try:
            rows.write(self._row, decoded(handle.metadata, rows.shape, self.bootstrap_room))
        except KvferryError as error:
            self.refuse(str(error))

    def refuse(self, why: str) -> None:
        """This room can't be filled. Prefill hears of it, whether its pages were offered or not."""
        if self._refusal is None and self._handle is None:
            self._decline()
        self._refusal = self._refusal or why
        self._abort_handle()

    def _decline(self) -> None:
        view = self.kv_mgr.prefill_info_table.view(self.bootstrap_addr, self._prefill or "")
        if view is None:
            # Nobody knows whom to tell; prefill's own deadline ends the room there.
            return
        try:
            self.kv_mgr.decline(self.bootstrap_room, view)
        except KvferryError as error:
            log.warning("not-declined room=%r reason=%r", self.bootstrap_room, str(error))

    def failure_exception(self) -> None:
        """Raise why it failed."""
        if self._refusal is not None:
            raise RoomFailed(self.bootstrap_room, self._refusal)
        own = self._handle.failure if self._handle is not None else None
        if own is None:
            raise RoomFailed(self.bootstrap_room, "another rank failed", is_from_another_rank=True)
        raise RoomFailed(self.bootstrap_room, str(own))

    def abort(self) -> None:
        """Give the room up. Its pages are held until nobody can write them."""
        if self._handle is None:
            table = self.kv_mgr.prefill_info_table
            known = table.get(self.bootstrap_addr) is not None
            self.refuse("aborted by SGLang" if known else table.problem(self.bootstrap_addr))
        else:
            self._abort_handle()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Another rank's part failed, or ours: it ends here too, and the pages wait."""
        self._abort_handle()

    def _abort_handle(self) -> None:
        if self._handle is not None:
            self.abort_notified = True
            self._handle.abort()

    def clear(self) -> None:
        """SGLang has done with the room."""
        if self._handle is not None:
            self.kv_mgr.let_go(self.bootstrap_room, self._handle)
