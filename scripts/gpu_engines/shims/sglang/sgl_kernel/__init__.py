"""A stand-in for SGLang's compiled kernels: what a dense text model calls, in PyTorch.

Every other name and submodule can be imported, and raises when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    wide = input.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(input.dtype) if out is None else out.copy_(normed)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    residual.add_(input)
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate).mul_(up)
    return product.to(input.dtype) if out is None else out.copy_(product)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Missing:
    """A name that the stand-in lacks, or an attribute of one: usable in tables, not callable."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _missing(name, self._name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {self._name}")


def _missing(name: str, owner: str | None = None) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "is_arch_support_pdl":
        return lambda: False
    return _Missing(name if owner is None else f"{owner}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _missing


sys.meta_path.append(_Finder())
__getattr__ = _missing
