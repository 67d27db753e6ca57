"""Rooms of a prefill rank. Transfers are tested in ``test_transfer_between_ranks.py``."""

from __future__ import annotations

from kvferry.connectors.vllm.sources import LayerSteps


def test_layer_is_computed_when_all_its_caches_are() -> None:
    steps = LayerSteps([{0: "0.attn", 1: "1.attn"}, {1: "1.index"}])
    assert steps.computed("0.attn") is None, "no step has begun"
    for _ in range(2):
        steps.begin()
        told = [steps.computed(name) for name in ("0.attn", "1.index", "1.attn", "1.attn", "other")]
        assert told == [0, None, 1, None, None]
