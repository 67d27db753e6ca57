"""The worker pool: health of workers, and the choice of the next one."""

from __future__ import annotations

import pytest

from kvferry.router.options import BalancePolicy
from kvferry.router.worker_pool import (
    REJECTED_S,
    AllFull,
    AnnouncedWorker,
    Worker,
    WorkerHealth,
    WorkerPool,
    WorkerRole,
)

LOST_S = 10.0


def health(worker: Worker, **changes: object) -> WorkerHealth:
    fields = {"role": worker.role, "name": worker.url, "model": "m"} | changes
    return WorkerHealth(**fields)  # type: ignore[arg-type]


def pool_of(num_workers: int, policy: BalancePolicy = BalancePolicy.LEAST_LOADED) -> WorkerPool:
    """Decode workers w0, w1, …, found at the discovery service, all up at time 0."""
    pool = WorkerPool(policy, LOST_S)
    pool.update_listed(listed(num_workers))
    for worker in pool.workers:
        pool.mark_up(worker, health(worker), 0.0)
    return pool


def listed(num_workers: int) -> list[AnnouncedWorker]:
    return [AnnouncedWorker(f"w{i}", WorkerRole.DECODE) for i in range(num_workers)]


def choose(pool: WorkerPool, avoid: set[str] = frozenset()) -> str | None:  # type: ignore[assignment]
    worker = pool.choose(WorkerRole.DECODE, "m", avoid)
    return worker.url if worker else None


def test_workers_are_unused_before_their_first_check() -> None:
    pool = WorkerPool(BalancePolicy.ROUND_ROBIN, LOST_S, [AnnouncedWorker("w", WorkerRole.DECODE)])
    assert choose(pool) is None
    (worker,) = pool.workers
    pool.mark_up(worker, health(worker), 0.0)
    assert choose(pool) == "w"
    assert pool.choose(WorkerRole.PREFILL, "m") is None
    assert pool.choose(WorkerRole.DECODE, "other") is None


def test_round_robin_ignores_load() -> None:
    pool = pool_of(3, BalancePolicy.ROUND_ROBIN)
    pool.workers[0].others = 9
    assert [choose(pool) for _ in range(4)] == ["w0", "w1", "w2", "w0"]
    assert choose(pool, {"w1"}) == "w2"


def test_least_loaded_breaks_ties_in_turn() -> None:
    pool = pool_of(3)
    with pool.workers[0].count_request():
        assert [choose(pool) for _ in range(3)] == ["w1", "w2", "w1"]
    assert choose(pool) == "w0"


def test_a_worker_that_rejects_is_left_out_although_it_is_well() -> None:
    pool = pool_of(2)
    first, _ = pool.workers
    first.leave_out(5.0)
    for now in (5.0, 4.9 + REJECTED_S):
        pool.mark_up(first, health(first), now)
        assert [choose(pool) for _ in range(2)] == ["w1", "w1"]
    pool.mark_up(first, health(first), 5.0 + REJECTED_S)
    assert choose(pool) == "w0"


def test_a_worker_that_rejected_is_used_once_it_has_restarted() -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    worker.leave_out(5.0)
    pool.mark_missed(worker, "slow", 6.0, sure=False)
    pool.mark_up(worker, health(worker), 6.5)
    assert not worker.up
    pool.mark_missed(worker, "connection refused", 7.0, sure=True)
    pool.mark_up(worker, health(worker), 8.0)
    assert worker.up


def test_requests_of_other_clients_are_counted_separately() -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    with worker.count_request(), worker.count_request():
        pool.mark_up(worker, health(worker, running=4, waiting=1), 1.0)
        assert worker.load == 5
    assert worker.load == 3
    pool.mark_up(worker, health(worker), 2.0)
    assert worker.load == 0


def test_a_full_worker_is_not_chosen() -> None:
    pool = pool_of(2)
    changes: list[int] = []
    pool.on_change = lambda: changes.append(1)
    first, second = pool.workers
    pool.mark_up(first, health(first, max_in_flight=1), 1.0)
    with first.count_request():
        assert [choose(pool), choose(pool)] == ["w1", "w1"]
        second.refuses = True
        with pytest.raises(AllFull):
            choose(pool)
        assert choose(pool, {"w0", "w1"}) is None
    assert choose(pool) == "w0"
    with second.count_request():
        assert second.is_full
    assert choose(pool) == "w1", "a request has ended there"
    assert len(changes) == 3


@pytest.mark.parametrize(("num_tokens", "is_full"), [(8, False), (9, True), (10, True)])
def test_a_worker_whose_tokens_are_used_up_is_full(num_tokens: int, is_full: bool) -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    tokens = {"in_flight_tokens": num_tokens, "max_in_flight_tokens": 9}
    pool.mark_up(worker, health(worker, **tokens), 1.0)
    assert worker.is_full is is_full


def test_the_routers_limit_is_for_decode_workers_without_their_own() -> None:
    fixed = [AnnouncedWorker("d", WorkerRole.DECODE), AnnouncedWorker("p", WorkerRole.PREFILL)]
    pool = WorkerPool(BalancePolicy.LEAST_LOADED, LOST_S, fixed, max_in_flight=3)
    decode, prefill = pool.workers
    for worker in pool.workers:
        pool.mark_up(worker, health(worker), 0.0)
    assert (decode.max_in_flight, prefill.max_in_flight) == (3, None)
    pool.mark_up(decode, health(decode, max_in_flight=7), 1.0)
    assert decode.max_in_flight == 7


def test_two_missed_checks_mark_a_worker_down() -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    pool.mark_missed(worker, "slow", 1.0, sure=False)
    assert worker.up
    pool.mark_missed(worker, "slow", 2.0, sure=False)
    assert (worker.up, worker.lost.is_set()) == (False, False)
    pool.mark_missed(worker, "slow", LOST_S + 1, sure=False)
    assert worker.lost.is_set()
    pool.mark_up(worker, health(worker), LOST_S + 2)
    assert (worker.up, worker.lost.is_set()) == (True, False)


def test_an_unhealthy_worker_is_down_but_not_lost() -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    pool.mark_missed(worker, "refused", 1.0, sure=True)
    assert (worker.up, worker.lost.is_set()) == (False, False)


def test_an_unlisted_idle_worker_is_dropped() -> None:
    pool = pool_of(2)
    worker = pool.workers[0]
    pool.update_listed([])
    assert len(pool.workers) == 2, "the discovery service may have just started"
    with worker.count_request():
        pool.mark_missed(worker, "gone", 1.0, sure=True)
        assert len(pool.workers) == 2
    pool.mark_missed(worker, "gone", 2.0, sure=True)
    assert [one.url for one in pool.workers] == ["w1"]
    pool.update_listed(listed(2))
    assert len(pool.workers) == 2


def test_a_fixed_worker_is_never_dropped() -> None:
    pool = WorkerPool(BalancePolicy.ROUND_ROBIN, LOST_S, [AnnouncedWorker("w", WorkerRole.DECODE)])
    pool.mark_missed(pool.workers[0], "gone", 1.0, sure=True)
    pool.update_listed([])
    assert len(pool.workers) == 1
