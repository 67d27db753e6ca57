"""Copies of bound pieces between regions of host memory, at the memory's own speed.

The loop (``copy.native``) is compiled once and cached on disk; the interpreter's
lock is free while it copies, so any thread may call this. Addresses are
trusted: whoever calls this has checked that the pieces lie inside their
regions. numba is imported on first use only, so that a machine whose memory is
all on GPUs can do without it.
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
    """Copy every piece from its source region into its target region, given by addresses.

    ``keep`` leaves what was written in the processor's cache. That is right for a
    staging slot, which is read again at once, and wrong for pages.
    """
    copy = _loop.get()
    for alike in _alike(binding.parts):
        if not copy(*_arguments(alike, sources, targets), keep):
            first = alike[0]
            raise InputError(
                f"{first.group}.{first.tensor} has a negative number of pieces or bytes in a "
                f"piece; take the binding from kvferry.plan.bind"
            )


def _alike(parts: Sequence[BindingPart]) -> list[list[BindingPart]]:
    """Neighbours with the very same pieces, as K and V often have: one call copies them all."""
    groups: list[list[BindingPart]] = []
    for part in parts:
        if groups and groups[-1][0].pieces is part.pieces:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def warm_up() -> float:
    """Compile the loop, or load it from the cache, before the first transfer; seconds taken."""
    begin = time.perf_counter()
    _loop.get()
    return time.perf_counter() - begin


def _arguments(
    alike: Sequence[BindingPart], sources: Sequence[int], targets: Sequence[int]
) -> tuple[Any, ...]:
    pieces = alike[0].pieces
    ours = [sources[base.region] + base.offset for part in alike for base in part.source_bases]
    theirs = [targets[base.region] + base.offset for part in alike for base in part.target_bases]
    bases = np.array(ours, dtype=np.int64), np.array(theirs, dtype=np.int64)
    return bases, pieces[:5], (*pieces.row_stride, *pieces.col_stride)


# ---------------------------------------------------------------- compiling


class _Loop:
    """The compiled loop, made when it is first asked for, by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: Callable[..., bool] | None = None

    def get(self) -> Callable[..., bool]:
        """The compiled loop."""
        if self._compiled is None:
            with self._lock:
                self._compiled = self._compiled or _compile()
        return self._compiled


_loop = _Loop()


def _compile() -> Callable[..., bool]:
    native = importlib.import_module("kvferry.memory.copy.native")
    # numba writes its index before the code it points to. Under a name that no other source,
    # version or processor has, a process that starts or dies in between does no harm: whatever
    # is found there is either missing or the same.
    native.copy_part.__qualname__ = f"copy_part_{_fingerprint(native)}"
    loop: Callable[..., bool]
    try:
        loop = native.compiled(cache=True)
    except (OSError, RuntimeError):
        # Neither the package's folder nor the user's cache folder can be written.
        loop = native.compiled(cache=False)
    return loop


def _fingerprint(native: Any) -> str:
    source = Path(native.__file__).read_bytes()
    return hashlib.sha256(repr((source, native.platform())).encode()).hexdigest()[:16]
