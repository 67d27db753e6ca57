"""Loops that numba compiles once and caches on disk.

Their modules are imported on first use, so a machine with GPU memory only does not need numba.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CompiledLoop:
    """A function of a module with ``compiled()`` and ``platform()``. Any thread may get it.

    The first thread that needs it compiles it, or loads it from the disk cache.
    """

    def __init__(self, module: str, function: str) -> None:
        self._module = module
        self._function = function
        self._lock = threading.Lock()
        self._compiled: Callable[..., Any] | None = None

    def get(self) -> Callable[..., Any]:
        """Return the compiled function."""
        if self._compiled is None:
            with self._lock:
                self._compiled = self._compiled or self._compile()
        return self._compiled

    def _compile(self) -> Callable[..., Any]:
        native = importlib.import_module(self._module)
        # numba writes its cache index before the code, so another process may find an incomplete
        # entry. With a name that is unique to source, version and processor, what a process finds
        # is either missing or the same code.
        name = f"{self._function}_{_fingerprint(native)}"
        getattr(native, self._function).__qualname__ = name
        loop: Callable[..., Any]
        try:
            loop = native.compiled(cache=True)
        except (OSError, RuntimeError):
            # Neither the package's folder nor the user's cache folder is writable.
            loop = native.compiled(cache=False)
        return loop


def _fingerprint(native: Any) -> str:
    source = Path(native.__file__).read_bytes()
    return hashlib.sha256(repr((source, native.platform())).encode()).hexdigest()[:16]
