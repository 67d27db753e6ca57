"""One write through NIXL, batch after batch."""

from __future__ import annotations

from typing import Any

from kvferry.ids import Op
from kvferry.transports.nixl.batches import DescriptorBatch
from kvferry.transports.nixl.peers import NixlConnection, release


class NixlWrite:
    """A write under way: at most one of its batches is NIXL's at any time.

    So when a batch can't be made, nothing is under way.
    """

    def __init__(self, remote: NixlConnection, op: Op, batches: list[DescriptorBatch]) -> None:
        self.remote = remote
        self.op = op
        self._todo = batches[::-1]
        self._batch: DescriptorBatch | None = None
        self._handle: Any = None
        self._act: Any = None

    @property
    def has_more(self) -> bool:
        """Whether batches are left that NIXL has not seen."""
        return bool(self._todo)

    def make(self, agent: Any) -> None:
        """Hand NIXL the next batch, if it has none. Nothing is submitted yet."""
        if self._handle is not None or not self._todo:
            return
        batch = self._batch = self._todo.pop()
        self._handle = self.remote.peer.handles.acquire(batch.piece)
        if self._handle is None:
            self._handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(batch.source, batch.source_kind),
                agent.get_xfer_descs(batch.target, batch.target_kind),
                self.remote.peer.name,
            )
        self._act = agent.transfer

    def go_on(self, agent: Any) -> bool:
        """Submit the batch or look after it; whether it is done, as an empty write always is."""
        if self._handle is None:
            return True
        state = self._act(self._handle)
        self._act = agent.check_xfer_state
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL says {state}")
        if state == "DONE" and self._batch is not None:
            self.remote.peer.handles.keep(self._batch.piece, self._handle)
            self._handle = None
        return bool(state == "DONE")

    def give_up(self) -> bool:
        """Hand NIXL no more of it; whether a batch is still under way."""
        self._todo.clear()
        return self._handle is not None

    def release(self) -> None:
        """Give the batch back to NIXL. That does not stop it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            release(handle)
