"""Socket pairs between the ranks of one host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvferry.reference.ranks.collectives import Comm, connected

PATIENCE_S = 60.0


def met(num_ranks: int, lost_s: float = PATIENCE_S) -> list[Comm]:
    return [Comm(sockets) for sockets in connected(num_ranks, lost_s)]


def test_bytes_arrive_where_they_were_sent() -> None:
    """More of them than a socket's buffer holds."""
    ranks = met(3)
    sent = torch.arange(3_000_000)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ranks[2].send, sent, 0)
        got = torch.zeros_like(sent)
        ranks[0].receive(got, 2)
        sending.result(PATIENCE_S)
    assert torch.equal(got, sent)
    for one in ranks:
        one.close()
        one.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 9])
def test_every_rank_has_the_sum(num_ranks: int) -> None:
    ranks = met(num_ranks)

    def run(number: int) -> list[float]:
        total: list[float] = ranks[number].total(torch.tensor([1.0, float(number)])).tolist()
        return total

    with ThreadPoolExecutor(num_ranks) as pool:
        totals = list(pool.map(run, range(num_ranks)))
    assert totals == [[num_ranks, sum(range(num_ranks))]] * num_ranks
    for one in ranks:
        one.close()


def test_a_peer_that_leaves_is_an_error_at_once() -> None:
    first, second = met(2)
    second.close()
    with pytest.raises(ConnectionResetError, match="rank 1 has left"):
        first.receive(torch.zeros(4), 1)
    with pytest.raises(BrokenPipeError):
        first.send(torch.zeros(4), 1)
    first.close()


def test_a_peer_that_is_silent_is_an_error_in_time() -> None:
    first, second = met(2, lost_s=0.5)
    with pytest.raises(TimeoutError, match="rank 1 does not answer"):
        first.receive(torch.zeros(4), 1)
    with pytest.raises(TimeoutError):
        first.send(torch.zeros(50 << 18), 1)
    first.close()
    second.close()
