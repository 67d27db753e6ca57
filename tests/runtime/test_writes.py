"""Which writes an owner makes itself, rather than hand them to the mover."""

from __future__ import annotations

import pytest

from kvferry.plan.bind import Size
from kvferry.runtime.owner.writes import AT_ONCE_BYTES, AT_ONCE_PIECES, is_small


@pytest.mark.parametrize(
    ("num_bytes", "num_pieces", "small"),
    [
        (AT_ONCE_BYTES, AT_ONCE_PIECES, True),
        (AT_ONCE_BYTES + 1, 1, False),
        (1, AT_ONCE_PIECES + 1, False),
    ],
)
def test_an_owner_writes_what_is_short_and_in_few_pieces(
    num_bytes: int, num_pieces: int, small: bool
) -> None:
    assert is_small(Size(num_bytes, num_pieces)) == small
