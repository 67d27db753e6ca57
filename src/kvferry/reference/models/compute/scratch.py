"""Memory that layers gather into, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """One block, as large as the largest that was taken.

    A step at a long context gathers hundreds of megabytes in all. In memory that is
    new each time, the system's work to provide it takes longer than the copy.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, shape: Sequence[int]) -> Tensor:
        """A tensor with any contents. What was taken before may be in the same place."""
        size = math.prod(shape)
        if size > len(self._memory):
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(*shape)
