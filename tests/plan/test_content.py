"""Which rooms are proven, and with which seed. ``memory/checksum/test_cpu.py`` tests the sums."""

from __future__ import annotations

import pytest

from kvferry.ids import MAX_ID
from kvferry.plan.content import ALL_CELLS, room_proof


def test_a_part_of_the_rooms_is_proven() -> None:
    chosen = [room_proof(MAX_ID - 5, number, 1 / 64, 0.25) for number in range(20_000)]
    found = [proof for proof in chosen if proof is not None]
    assert len(found) == pytest.approx(20_000 / 64, rel=0.2)
    assert {proof.share for proof in found} == {ALL_CELLS // 4}
    assert len({proof.seed for proof in found}) == len(found)


def test_every_room_or_none_is_proven() -> None:
    assert all(room_proof(7, number, 1.0, 1.0) for number in range(1000))
    assert not any(room_proof(7, number, 0.0, 1.0) for number in range(1000))
    assert not any(room_proof(7, number, 1.0, 0.0) for number in range(1000))


def test_an_attempt_at_another_endpoint_has_another_seed() -> None:
    seeds = {room_proof(origin, 1, 1.0, 1.0) for origin in range(1000)}
    assert len(seeds) == 1000
