"""How ranks of one host meet, what they exchange, and what happens when one is not there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.reference.ranks.sockets import RankSockets, meet, peers_of

PATIENCE_S = 60.0


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (9, 1), (1, 4), (3, 2), (2, 3)])
def test_whoever_talks_to_another_is_talked_to(tp: int, pp: int) -> None:
    peers = {rank: peers_of(rank, tp, pp) for rank in range(tp * pp)}
    for rank, others in peers.items():
        assert rank not in others
        assert all(rank in peers[other] for other in others)
    # Everybody can reach everybody, if over others.
    reached, fresh = {0}, {0}
    while fresh:
        fresh = set().union(*(peers[rank] for rank in fresh)) - reached
        reached |= fresh
    assert reached == set(peers)


def met(folder: Path, tp: int, pp: int, timeout_s: float = PATIENCE_S) -> list[RankSockets]:
    ranks = range(tp * pp)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(
            pool.map(lambda rank: meet(folder, rank, peers_of(rank, tp, pp), timeout_s), ranks)
        )


def test_bytes_arrive_where_they_were_sent(tmp_path: Path) -> None:
    """More of them than a socket holds; and nobody else can come in afterwards."""
    sockets = met(tmp_path, 3, 2)
    assert list(tmp_path.iterdir()) == []
    sent = np.arange(3_000_000, dtype=np.uint32).view(np.uint8)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sockets[4].send, sent, 3)
        got = np.zeros_like(sent)
        sockets[3].receive(got, 4)
        sending.result(PATIENCE_S)
    assert np.array_equal(got, sent)
    for one in sockets:
        one.close()
        one.close()


def test_a_peer_that_leaves_is_an_error_at_once(tmp_path: Path) -> None:
    first, second = met(tmp_path, 2, 1)
    second.close()
    with pytest.raises(ConnectionResetError, match="rank 1 has left"):
        first.receive(np.zeros(4, np.uint8), 1)
    with pytest.raises(BrokenPipeError):
        first.send(np.zeros(4, np.uint8), 1)
    first.close()


def test_a_peer_that_is_silent_is_an_error_in_time(tmp_path: Path) -> None:
    first, second = met(tmp_path, 2, 1, timeout_s=0.5)
    with pytest.raises(BlockingIOError):
        first.receive(np.zeros(4, np.uint8), 1)
    with pytest.raises(BlockingIOError):
        first.send(np.zeros(50 << 20, np.uint8), 1)
    first.close()
    second.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_does_not_come_is_told(tmp_path: Path, rank: int) -> None:
    with pytest.raises(RuntimeError, match="not all ranks came within"):
        meet(tmp_path, rank, {1 - rank}, 0.1)


def test_a_driver_that_has_left_is_told(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError, match="the driver has left"):
        meet(tmp_path / "gone", 0, {1}, PATIENCE_S)


def test_a_folder_with_too_long_a_name_is_one_sentence(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    with pytest.raises(InputError, match="set TMPDIR to a folder with a short name"):
        meet(long, 0, {1}, PATIENCE_S)
