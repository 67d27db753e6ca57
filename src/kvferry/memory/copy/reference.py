"""The reference copy, one piece at a time, with which tests compare the fast ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.bind import Descriptors

Region = NDArray[np.uint8]


def copy_pieces(pieces: Descriptors, sources: Sequence[Region], targets: Sequence[Region]) -> None:
    """Copy every piece from its source region into its target region."""
    for source, at, target, to, length in zip(*(c.tolist() for c in pieces), strict=True):
        targets[target][to : to + length] = sources[source][at : at + length]
