"""One write through NIXL, batch after batch."""

from __future__ import annotations

from typing import Any

from kvferry.ids import Op
from kvferry.transports.nixl.batches import DescriptorBatch
from kvferry.transports.nixl.peers import NixlConnection, release


class NixlWrite:
    """A write in flight. At most one of its batches is submitted at any time.

    So if the next batch cannot be prepared, nothing is in flight.
    """

    def __init__(self, remote: NixlConnection, op: Op, batches: list[DescriptorBatch]) -> None:
        self.remote = remote
        self.op = op
        self._todo = batches[::-1]
        self._batch: DescriptorBatch | None = None
        self._handle: Any = None
        self._advance: Any = None

    @property
    def has_more(self) -> bool:
        """Whether batches are left to submit."""
        return bool(self._todo)

    def prepare(self, agent: Any) -> None:
        """Make the next batch's handle if no batch is current. This submits nothing."""
        if self._handle is not None or not self._todo:
            return
        batch = self._batch = self._todo.pop()
        self._handle = self.remote.peer.handles.acquire(batch.single)
        if self._handle is None:
            self._handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(batch.source, batch.source_type),
                agent.get_xfer_descs(batch.target, batch.target_type),
                self.remote.peer.name,
            )
        self._advance = agent.transfer

    def progress(self, agent: Any) -> bool:
        """Submit the current batch or check on it; return whether it has completed.

        An empty write has completed from the start. Raises if the connection has failed.
        """
        if self._handle is None:
            return True
        state = self._advance(self._handle)
        self._advance = agent.check_xfer_state
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL reports {state}")
        if state == "DONE" and self._batch is not None:
            self.remote.peer.handles.keep(self._batch.single, self._handle)
            self._handle = None
        return bool(state == "DONE")

    def cancel_rest(self) -> bool:
        """Drop the batches that were not submitted; return whether one is in flight."""
        self._todo.clear()
        return self._handle is not None

    def release(self) -> None:
        """Release the current handle. This does not stop the transfer."""
        handle, self._handle = self._handle, None
        if handle is not None:
            release(handle)
