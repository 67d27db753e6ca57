"""Layers per push, configured or measured, and events of a CPU."""

from __future__ import annotations

import pytest
import torch

from kvferry import EventRecorder, LayerPushTuner, Layers, Layout, Parallel, attention
from kvferry.plan.cost import PRESETS

LAYOUT = Layout(attention(layers=12, kv_heads=4, head_dim=8), Parallel(pp=2))


def per_push(layers: Layers, *, timed: bool = False) -> int:
    tuner = LayerPushTuner(layers, LAYOUT, 1)
    assert (tuner.first, tuner.end, tuner.num_layers) == (6, 12, 6)
    if timed:
        tuner.begin(100_000_000)
        tuner.finish()
        tuner.begin(1)
    return tuner.per_push(256, 256, PRESETS["shm"])


@pytest.mark.parametrize(("layers", "wanted"), [("all", 6), (1, 1), (4, 4), (100, 6)])
def test_a_configured_number_is_used(layers: Layers, wanted: int) -> None:
    assert per_push(layers) == wanted


def test_all_layers_are_pushed_at_once_until_a_step_was_timed_or_if_steps_take_no_time() -> None:
    assert per_push("auto") == 6
    # So many tokens in no time: there is no computation to overlap with.
    assert per_push("auto", timed=True) == 6


def test_few_layers_are_pushed_if_computing_takes_long() -> None:
    tuner = LayerPushTuner("auto", LAYOUT, 0)
    tuner.begin(1)
    tuner.finish()
    tuner.begin(1)
    # Even if that was quick, a billion tokens take long.
    assert tuner.per_push(1_000_000_000, 100_000, PRESETS["shm"]) < 6


def test_a_cpu_needs_no_event_and_uses_the_clock() -> None:
    recorder = EventRecorder(torch.device("cpu"))
    assert recorder.computed() is None
    first, second = recorder.now(), recorder.now()
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert first <= second
