"""Socket pairs between the ranks of one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.reference.ranks.collectives import RankSockets, connected_pairs, peers_of

PATIENCE_S = 60.0


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (9, 1), (1, 4), (3, 2), (2, 3)])
def test_peers_are_mutual_and_connect_all_ranks(tp: int, pp: int) -> None:
    peers = {rank: peers_of(rank, tp, pp) for rank in range(tp * pp)}
    for rank, others in peers.items():
        assert rank not in others
        assert all(rank in peers[other] for other in others)
    reached, fresh = {0}, {0}
    while fresh:
        fresh = set().union(*(peers[rank] for rank in fresh)) - reached
        reached |= fresh
    assert reached == set(peers)


def met(tp: int, pp: int, lost_s: float = PATIENCE_S) -> list[RankSockets]:
    return [RankSockets(ends, lost_s) for ends in connected_pairs(tp, pp).values()]


def test_bytes_arrive_where_they_were_sent() -> None:
    """More of them than a socket's buffer holds."""
    sockets = met(3, 2)
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


def test_a_peer_that_leaves_is_an_error_at_once() -> None:
    first, second = met(2, 1)
    second.close()
    with pytest.raises(ConnectionResetError, match="rank 1 has left"):
        first.receive(np.zeros(4, np.uint8), 1)
    with pytest.raises(BrokenPipeError):
        first.send(np.zeros(4, np.uint8), 1)
    first.close()


def test_a_peer_that_is_silent_is_an_error_in_time() -> None:
    first, second = met(2, 1, lost_s=0.5)
    with pytest.raises(TimeoutError, match=r"rank 1 has not answered for 0\.5 s"):
        first.receive(np.zeros(4, np.uint8), 1)
    with pytest.raises(TimeoutError):
        first.send(np.zeros(50 << 20, np.uint8), 1)
    first.close()
    second.close()
