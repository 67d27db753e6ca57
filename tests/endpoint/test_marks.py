"""Marks of a CPU, where what was called for is done."""

from __future__ import annotations

import torch

from kvferry import EventRecorder


def test_a_cpu_is_done_and_its_time_is_the_clock_s() -> None:
    marks = EventRecorder(torch.device("cpu"))
    assert marks.computed() is None
    first, second = marks.now(), marks.now()
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert first <= second
