"""Where engines write the entry of each token, as recorded from their own functions.

``tests_vllm/test_slot_mappings.py`` and ``tests_sglang/test_slot_mappings.py`` compute the same
numbers with the installed engine, compare them with the record, and write it if it is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "slot_mappings"
NUM_BLOCKS = 120
NUM_TOKENS = 1100

Slots = NDArray[np.int64]


class SlotCase(NamedTuple):
    """An engine whose ``dcp`` ranks take turns at ``interleave`` tokens, in pages of ``page``.

    An entry stands for ``ratio`` tokens.
    """

    engine: str
    dcp: int
    interleave: int
    page: int
    ratio: int = 1

    def __str__(self) -> str:
        entries = "" if self.ratio == 1 else f"-ratio{self.ratio}"
        return f"{self.engine}-dcp{self.dcp}-by{self.interleave}-page{self.page}{entries}"

    @property
    def blocks(self) -> Slots:
        """The blocks that the scheduler gave the request, the same on every rank."""
        num_blocks = -(-NUM_TOKENS // (self.page * self.dcp))
        rng = np.random.default_rng([self.dcp, self.page])
        return rng.permutation(max(NUM_BLOCKS, num_blocks))[:num_blocks]

    def recorded(self) -> Slots:
        """Return the slot of each token on each rank, ``[rank, token]``; -1 if it has none."""
        with np.load(self.path) as stored:
            return np.asarray(stored["slots"], dtype=np.int64)

    def record(self, slots: Slots) -> None:
        """Write the record."""
        FOLDER.mkdir(exist_ok=True)
        np.savez_compressed(self.path, slots=slots.astype(np.int32))

    @property
    def path(self) -> Path:
        """The file of the record."""
        return FOLDER / f"{self}.npz"


VLLM = tuple(
    SlotCase("vllm", *sizes)
    for sizes in (
        (1, 1, 16),
        (2, 16, 16),
        (4, 1, 16),
        (4, 16, 64),
        (8, 1, 16),
        (8, 64, 64),
    )
)
# Blocks of DeepSeek V4's cache groups, whose entries stand for 1, 4 or 128 tokens.
VLLM_GROUPS = tuple(
    SlotCase("vllm", 1, 1, *sizes)
    for sizes in ((4, 1), (8, 1), (64, 1), (256, 4), (256, 128), (128, 4), (128, 128))
)
SGLANG = tuple(SlotCase("sglang", *sizes) for sizes in ((1, 1, 64), (4, 1, 16), (8, 1, 64)))
