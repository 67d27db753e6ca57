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
from kvferry.plan.bind import Binding, Part
from kvferry.plan.places import Base, Int64s


def copy_binding(
    binding: Binding, sources: Sequence[int], targets: Sequence[int], *, keep: bool = False
) -> None:
    """Copy every piece from its source region into its target region, given by addresses.

    ``keep`` leaves what was written in the processor's cache. That is right for a
    staging slot, which is read again at once, and wrong for pages.
    """
    copy = _loop.get()
    for part in binding.parts:
        if not copy(*_arguments(part, sources, targets), keep):
            raise InputError(
                f"{part.group}.{part.tensor} has a negative number of pieces or bytes in a "
                f"piece; take the binding from kvferry.plan.bind"
            )


def warm_up() -> float:
    """Compile the loop, or load it from the cache, before the first transfer; seconds taken."""
    begin = time.perf_counter()
    _loop.get()
    return time.perf_counter() - begin


def _arguments(part: Part, sources: Sequence[int], targets: Sequence[int]) -> tuple[Any, ...]:
    pieces = part.pieces
    bases = _addresses(part.source_bases, sources), _addresses(part.target_bases, targets)
    return bases, pieces[:5], (*pieces.row_stride, *pieces.col_stride)


def _addresses(bases: Sequence[Base], regions: Sequence[int]) -> Int64s:
    addresses = [regions[base.region] + base.offset for base in bases]
    return np.fromiter(addresses, np.int64, len(addresses))


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
    native = importlib.import_module("kvferry.copy.native")
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
