"""How many layers a rank pushes at a time, as it was told or as it has measured."""

from __future__ import annotations

import pytest

from kvferry import PRESETS, LayerPushTuner, Layers, Layout, Parallel, attention

LAYOUT = Layout(attention(layers=12, kv_heads=4, head_dim=8), Parallel(pp=2))


def per_push(layers: Layers, *, timed: bool = False) -> int:
    pace = LayerPushTuner(layers, LAYOUT, 1)
    assert (pace.first, pace.end, pace.num_layers) == (6, 12, 6)
    if timed:
        pace.begin(100_000_000)
        pace.finish()
        pace.begin(1)
    return pace.per_push(256, 256, PRESETS["shm"])


@pytest.mark.parametrize(("layers", "wanted"), [("all", 6), (1, 1), (4, 4), (100, 6)])
def test_as_it_was_told(layers: Layers, wanted: int) -> None:
    assert per_push(layers) == wanted


def test_whole_chunks_until_a_step_was_timed_and_where_there_is_nothing_to_hide_behind() -> None:
    assert per_push("auto") == 6
    # A step of that many tokens in no time: sending is all that is left to do.
    assert per_push("auto", timed=True) == 6


def test_few_layers_where_computing_takes_long() -> None:
    pace = LayerPushTuner("auto", LAYOUT, 0)
    pace.begin(1)
    pace.finish()
    pace.begin(1)
    # However quick that was, a thousand million tokens take long.
    assert pace.per_push(1_000_000_000, 100_000, PRESETS["shm"]) < 6
