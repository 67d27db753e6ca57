"""The layers of a step: vLLM names caches as it fills them, a push names layers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class LayerSteps:
    """Which layers a step has computed. A layer may have several caches, each in a group."""

    def __init__(self, groups: Iterable[Mapping[int, str]]) -> None:
        self._layer_of: dict[str, int] = {}
        self._caches: dict[int, set[str]] = {}
        for group in groups:
            for layer, name in group.items():
                self._layer_of[name] = layer
                self._caches.setdefault(layer, set()).add(name)
        self._missing: dict[int, set[str]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._missing = {layer: set(names) for layer, names in self._caches.items()}

    def computed(self, name: str) -> int | None:
        """A cache was filled: the layer that is complete by it, if it is."""
        layer = self._layer_of.get(name)
        missing = self._missing.get(layer) if layer is not None else None
        if not missing:
            return None
        missing.discard(name)
        return None if missing else layer
