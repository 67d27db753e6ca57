"""Stand-in for torchvision, which SGLang and transformers import but do not use for text.

Every module below it can be imported, and has every name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.0.0"


class _Named(type):
    """A class that has every attribute, each of them another such class."""

    def __getattr__(cls, name: str) -> _Named:
        return _named(name)


def _named(name: str) -> _Named:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below this one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _named  # type: ignore[method-assign]


sys.meta_path.append(_Finder())
__getattr__ = _named
