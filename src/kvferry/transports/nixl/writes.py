"""One write through NIXL, as batches of descriptors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvferry.ids import Op
from kvferry.transports.nixl.batches import DescriptorBatch
from kvferry.transports.nixl.lists import CellBatch
from kvferry.transports.nixl.peers import NixlConnection, release
from kvferry.transports.single_descriptor import SingleDescriptor

# Submitted batches of one write. Enough to keep a network or a GPU busy while others are prepared.
MAX_IN_FLIGHT = 8


class _Submitted(NamedTuple):
    """The handle of a batch in flight, and its piece if it has only one."""

    handle: Any
    single: SingleDescriptor | None


class NixlWrite:
    """A write in flight. It submits a batch at a time, and up to ``MAX_IN_FLIGHT`` before waiting.

    If a batch cannot be prepared, the rest is dropped. The write then ends with ``problem`` once
    the submitted batches have ended.
    """

    def __init__(
        self, remote: NixlConnection, op: Op, batches: Sequence[DescriptorBatch | CellBatch]
    ) -> None:
        self.remote = remote
        self.op = op
        self.problem = ""
        self._todo = deque(batches)
        self._submitted: list[_Submitted] = []

    @property
    def can_submit(self) -> bool:
        """Whether the next batch may be submitted now."""
        return bool(self._todo) and len(self._submitted) < MAX_IN_FLIGHT

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight or left to submit. True from the start if it is empty."""
        return not self._todo and not self._submitted

    def progress(self, agent: Any) -> None:
        """Check on the submitted batches and submit the next one.

        Raises if the connection has failed.
        """
        for each in list(self._submitted):
            if self._is_done(agent.check_xfer_state(each.handle), each):
                self._submitted.remove(each)
        if not self.can_submit:
            return
        batch = self._todo.popleft()
        try:
            handle = self._handle(agent, batch)
        except Exception as error:  # Nothing of this batch was submitted.
            self.problem = f"{type(error).__name__}: {error}"
            self._todo.clear()
            return
        submitted = _Submitted(handle, batch.single)
        # Before the call, which may fail after it has submitted something.
        self._submitted.append(submitted)
        if self._is_done(agent.transfer(handle), submitted):
            self._submitted.remove(submitted)

    def _handle(self, agent: Any, batch: DescriptorBatch | CellBatch) -> Any:
        """Return a transfer handle of a batch, which submits nothing."""
        peer = self.remote.peer
        return peer.handles.acquire(batch.single) or batch.make_handle(agent, peer.name)

    def _is_done(self, state: str, submitted: _Submitted) -> bool:
        """Return whether a batch has ended, and if so keep or release its handle."""
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"NIXL reports {state}")
        if state == "DONE":
            self.remote.peer.handles.keep(submitted.single, submitted.handle)
        return state == "DONE"

    def cancel_rest(self) -> bool:
        """Drop the batches that were not submitted; return whether any is in flight."""
        self._todo.clear()
        return bool(self._submitted)

    def release(self) -> None:
        """Release the handles. This does not stop the transfers."""
        self._todo.clear()
        submitted, self._submitted = self._submitted, []
        for each in submitted:
            release(each.handle)
