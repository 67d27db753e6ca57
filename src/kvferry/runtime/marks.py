"""Marks behind what an engine's device was given to compute: that it is done, and when it was.

Needs torch only where the device is a GPU. For the engine's own thread, whose stream counts.
"""

from __future__ import annotations

import time
from typing import Any

from kvferry.runtime.outgoing import Waitable
from kvferry.runtime.pace import TimedEvent


class DeviceMarks:
    """Marks of one device, a ``torch.device``. On a CPU what was called for is done."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def computed(self) -> Waitable | None:
        """What happens once the device has done all that it was given; None where it is done."""
        return self._event(timing=False) if self._on_gpu else None

    def now(self) -> TimedEvent | float:
        """The time by the device: an event behind all that it was given, or the clock."""
        return self._event(timing=True) if self._on_gpu else time.perf_counter()

    @property
    def _on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _event(self, *, timing: bool) -> Any:
        import torch  # noqa: PLC0415 - whoever has a GPU has it

        event = torch.cuda.Event(enable_timing=timing)
        event.record(torch.cuda.current_stream(self._device))
        return event
