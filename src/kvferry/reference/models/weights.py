"""A rank's share of the weights, read from safetensors.

The files are mapped and only the slices that a rank computes with are read. A module asks for
its tensors by name and span while it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvferry import InputError, Span

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Weights:
    """The tensors of one model folder, open for reading. Use it as a context manager."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self.dtype = dtype
        self.device = device
        # safetensors has no types for its handles.
        self._files: dict[str, Any] = {}
        with ExitStack() as opening:
            for name in _file_names(folder):
                path = folder / name
                try:
                    handle = opening.enter_context(safe_open(path, framework="pt"))
                except (OSError, SafetensorError) as error:
                    message = f"{path} can't be read ({error}); download the model again"
                    raise InputError(message) from None
                self._files |= dict.fromkeys(handle.keys(), handle)
            self._open = opening.pop_all()

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

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
        if name not in self._files:
            raise InputError(
                f"{self._folder} has no tensor {name!r}; its weights do not fit its config.json"
            )
        return self._files[name].get_slice(name)

    def _loaded(self, tensor: Tensor) -> Tensor:
        # Always copy: nothing may keep the mapped file alive.
        return tensor.to(self.device, self.dtype, copy=True).contiguous()


def _file_names(folder: Path) -> list[str]:
    if not (folder / INDEX).exists():
        return [SINGLE]
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
    except msgspec.DecodeError as error:
        raise InputError(f"{folder / INDEX} can't be read ({error}); download it again") from None
    return sorted(set(index.weight_map.values()))
