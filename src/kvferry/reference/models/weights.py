"""A rank's share of the weights, read from ``model.safetensors``.

The file is mapped and only the slices that a rank computes with are read. A module asks for
its tensors by name and span while it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvferry import InputError, Span

FILE = "model.safetensors"


class Weights:
    """The tensors of one model folder, open for reading. Use it as a context manager."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._path = folder / FILE
        try:
            # safetensors has no types for its handles.
            file: Any = safe_open(self._path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{self._path} can't be read ({error}); download the model again"
            ) from None
        self._file = file
        self._names = frozenset(file.keys())

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def whole(self, name: str) -> Tensor:
        """Return one whole tensor."""
        return self._loaded(self._slice(name)[:])

    def rows(self, name: str, span: Span) -> Tensor:
        """Return the outputs ``span`` of a matrix, or elements of a vector."""
        return self._loaded(self._slice(name)[span.first : span.end])

    def columns(self, name: str, span: Span) -> Tensor:
        """Return the inputs ``span`` of a matrix."""
        return self._loaded(self._slice(name)[:, span.first : span.end])

    def stacked(self, parts: Sequence[tuple[str, Span]]) -> Tensor:
        """Return rows of several matrices as one matrix, for a single product."""
        return torch.cat([self.rows(name, span) for name, span in parts])

    def _slice(self, name: str) -> Any:
        if name not in self._names:
            raise InputError(f"{self._path} has no tensor {name!r}; it does not fit config.json")
        return self._file.get_slice(name)

    def _loaded(self, tensor: Tensor) -> Tensor:
        # Always copy: nothing may keep the mapped file alive.
        return tensor.to(self.device, self.dtype, copy=True).contiguous()
