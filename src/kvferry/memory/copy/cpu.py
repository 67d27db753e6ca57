"""Copies of bound pieces between regions of host memory.

The loop in ``copy.native`` is compiled once and cached on disk. It releases the GIL, and any thread
may call it. Addresses are not checked: the caller must ensure that pieces lie inside their
regions. numba is imported on first use, so a machine with GPU memory only does not need it.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import InputError
from kvferry.plan.bind import Binding, BindingPart


def copy_binding(
    binding: Binding, sources: Sequence[int], targets: Sequence[int], *, keep: bool = False
) -> None:
    """Copy every piece. ``sources`` and ``targets`` are the addresses of the regions.

    ``keep`` leaves the written bytes in the processor's cache. Use it for a staging slot, which is
    read again at once, and not for pages.
    """
    copy = _loop.get()
    # One call copies all parts that share their pieces.
    for parts in binding.parts_by_pieces():
        if not copy(*_arguments(parts, sources, targets), keep):
            first = parts[0]
            raise InputError(
                f"{first.group}.{first.tensor} has a negative number of pieces or bytes in a "
                f"piece; take the binding from kvferry.plan.bind"
            )


def warm_up() -> float:
    """Compile the loop, or load it from the disk cache. Return the seconds taken."""
    begin = time.perf_counter()
    _loop.get()
    return time.perf_counter() - begin


def _arguments(
    parts: Sequence[BindingPart], sources: Sequence[int], targets: Sequence[int]
) -> tuple[Any, ...]:
    pieces = parts[0].pieces
    from_ = [sources[base.region] + base.offset for part in parts for base in part.source_bases]
    into = [targets[base.region] + base.offset for part in parts for base in part.target_bases]
    bases = np.array(from_, dtype=np.int64), np.array(into, dtype=np.int64)
    return bases, pieces[:5], (*pieces.row_stride, *pieces.col_stride)


# ---------------------------------------------------------------- compiling


class _Loop:
    """The compiled loop. The first thread that needs it compiles it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: Callable[..., bool] | None = None

    def get(self) -> Callable[..., bool]:
        """Return the compiled loop."""
        if self._compiled is None:
            with self._lock:
                self._compiled = self._compiled or _compile()
        return self._compiled


_loop = _Loop()


def _compile() -> Callable[..., bool]:
    native = importlib.import_module("kvferry.memory.copy.native")
    # numba writes its cache index before the code, so another process may find an incomplete
    # entry. With a name that is unique to source, version and processor, what a process finds
    # is either missing or the same code.
    native.copy_part.__qualname__ = f"copy_part_{_fingerprint(native)}"
    loop: Callable[..., bool]
    try:
        loop = native.compiled(cache=True)
    except (OSError, RuntimeError):
        # Neither the package's folder nor the user's cache folder is writable.
        loop = native.compiled(cache=False)
    return loop


def _fingerprint(native: Any) -> str:
    source = Path(native.__file__).read_bytes()
    return hashlib.sha256(repr((source, native.platform())).encode()).hexdigest()[:16]
