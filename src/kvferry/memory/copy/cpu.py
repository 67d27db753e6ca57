"""Copies of bound pieces between regions of host memory.

The loop in ``copy.native`` is compiled once and cached on disk. It releases the GIL, and any thread
may call it. Addresses are not checked: the caller must ensure that pieces lie inside their
regions. numba is imported on first use, so a machine with GPU memory only does not need it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.errors import InputError
from kvferry.memory.compiled import CompiledLoop
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import one_piece

_loop = CompiledLoop("kvferry.memory.copy.native", "copy_part")


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
    """Compile the loop, or load it from the disk cache, and call it once for no content.

    The first call takes some ten milliseconds, in which numba imports what it finds types with.
    Returns the seconds taken.
    """
    begin = time.perf_counter()
    copy_binding(Binding((BindingPart("", "", (), (), one_piece(0)),)), (), ())
    return time.perf_counter() - begin


def _arguments(
    parts: Sequence[BindingPart], sources: Sequence[int], targets: Sequence[int]
) -> tuple[Any, ...]:
    pieces = parts[0].pieces
    from_ = [sources[base.region] + base.offset for part in parts for base in part.source_bases]
    into = [targets[base.region] + base.offset for part in parts for base in part.target_bases]
    bases = np.array(from_, dtype=np.int64), np.array(into, dtype=np.int64)
    return bases, pieces[:5], (*pieces.row_stride, *pieces.col_stride)
