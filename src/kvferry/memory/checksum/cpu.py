"""Sums of the cells of a room in host memory.

The loop in ``checksum.native`` releases the GIL, and any thread may call it. Addresses are not
checked: the caller must ensure that entries lie inside their regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.memory.compiled import CompiledLoop
from kvferry.plan.content import CellEntries, Words, chunk_keys

# Content per step, about a millisecond, so that a thread's other work waits no longer.
STEP_BYTES = 8 << 20

_loop = CompiledLoop("kvferry.memory.checksum.native", "add_entries")


def warm_up() -> None:
    """Compile the loop, or load it from the disk cache, and call it once for no content.

    The first call takes some ten milliseconds, in which numba imports what it finds types with.
    """
    numbers, words = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
    _loop.get()(words, (numbers, words), (numbers, numbers), (0, 0, 0, 0), (1, 1), words)


class CellSums:
    """The sums of chosen cells, computed step by step.

    ``addresses`` are those of the regions. Iterating over ``entries`` may raise ``InputError``.
    """

    def __init__(
        self, seed: int, num_cells: int, entries: Iterable[CellEntries], addresses: Sequence[int]
    ) -> None:
        self._keys = chunk_keys(seed)
        self._steps = (step for each in entries for step in _steps(each))
        self._addresses = addresses
        self._sums: Words = np.zeros(num_cells, dtype=np.uint64)

    def step(self) -> bool:
        """Add some content. Return False if there was none left."""
        entries = next(self._steps, None)
        if entries is None:
            return False
        first = [self._addresses[base.region] + base.offset for base in entries.bases]
        sums: Words = np.zeros(len(first), dtype=np.uint64)
        units = entries.units
        _loop.get()(
            self._keys,
            (np.array(first, dtype=np.int64), entries.labels),
            (entries.offsets, entries.positions),
            (len(units), units.first, entries.at.unit_stride, entries.unit_bytes),
            (entries.element_bytes, entries.element_stride),
            sums,
        )
        self._sums[entries.cells[:, 0]] += sums
        return True

    def finish(self) -> bytes:
        """Add the rest of the content and return the sums as little-endian words."""
        while self.step():
            pass
        return self.result

    @property
    def result(self) -> bytes:
        """The sums so far as little-endian words."""
        return self._sums.astype("<u8").tobytes()


def _steps(entries: CellEntries) -> Iterable[CellEntries]:
    """Cut entries by columns, and by layers into parts of about ``STEP_BYTES``."""
    for column in entries.columns():
        num_layers = max(1, STEP_BYTES // column.layer_bytes)
        for first in range(0, len(column.bases), num_layers):
            some = slice(first, first + num_layers)
            yield column._replace(
                cells=column.cells[some], bases=column.bases[some], labels=column.labels[some]
            )
