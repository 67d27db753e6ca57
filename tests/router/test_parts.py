"""The router's decisions, without a network: who is chosen, what is tried next, what is sent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.http.api_errors import ApiError
from kvferry.router.adapters import KvferryAdapter
from kvferry.router.bodies import RequestDefaults, parse_call
from kvferry.router.forward import AttemptState, next_try
from kvferry.router.options import BalancePolicy, OnFailure, RouterOptions
from kvferry.router.streams import WholeEvents
from kvferry.router.upstream import FailedAttempt, FaultDomain
from kvferry.router.worker_pool import AnnouncedWorker, Worker, WorkerHealth, WorkerPool, WorkerRole

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


# ---------------------------------------------------------------- the pool


def test_nobody_is_used_before_they_say_that_they_are_well() -> None:
    pool = WorkerPool(BalancePolicy.ROUND_ROBIN, LOST_S, [AnnouncedWorker("w", WorkerRole.DECODE)])
    assert choose(pool) is None
    (worker,) = pool.workers
    pool.mark_up(worker, health(worker), 0.0)
    assert choose(pool) == "w"
    assert pool.choose(WorkerRole.PREFILL, "m") is None
    assert pool.choose(WorkerRole.DECODE, "other") is None


def test_round_robin_does_not_look_at_load() -> None:
    pool = pool_of(3, BalancePolicy.ROUND_ROBIN)
    pool.workers[0].others = 9
    assert [choose(pool) for _ in range(4)] == ["w0", "w1", "w2", "w0"]
    assert choose(pool, {"w1"}) == "w2"


def test_the_least_loaded_is_chosen_and_ties_take_turns() -> None:
    pool = pool_of(3)
    with pool.workers[0].count_request():
        assert [choose(pool) for _ in range(3)] == ["w1", "w2", "w1"]
    assert choose(pool) == "w0"


def test_requests_of_others_are_told_apart_from_ours() -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    with worker.count_request(), worker.count_request():
        pool.mark_up(worker, health(worker, running=4, waiting=1), 1.0)
        assert worker.load == 5
    assert worker.load == 3
    pool.mark_up(worker, health(worker), 2.0)
    assert worker.load == 0


def test_one_slow_answer_is_forgiven_and_two_are_not() -> None:
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


def test_a_worker_that_refuses_is_left_out_but_may_finish() -> None:
    pool = pool_of(1)
    (worker,) = pool.workers
    pool.mark_missed(worker, "refused", 1.0, sure=True)
    assert (worker.up, worker.lost.is_set()) == (False, False)


def test_who_has_left_the_discovery_is_forgotten_when_nothing_is_under_way() -> None:
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


def test_a_given_address_is_never_forgotten() -> None:
    pool = WorkerPool(BalancePolicy.ROUND_ROBIN, LOST_S, [AnnouncedWorker("w", WorkerRole.DECODE)])
    pool.mark_missed(pool.workers[0], "gone", 1.0, sure=True)
    pool.update_listed([])
    assert len(pool.workers) == 1


# ---------------------------------------------------------------- what is tried next


def failure(part: WorkerRole, fault_domain: FaultDomain) -> FailedAttempt:
    return FailedAttempt(Worker("u", part, "n", fixed=True), fault_domain, "why")


@pytest.mark.parametrize(
    ("part", "fault_domain", "on_failure", "again", "local"),
    [
        (WorkerRole.PREFILL, FaultDomain.WORKER, OnFailure.RETRY, True, False),
        (WorkerRole.PREFILL, FaultDomain.WORKER, OnFailure.LOCAL, True, True),
        (WorkerRole.PREFILL, FaultDomain.WORKER, OnFailure.FAIL, False, False),
        (WorkerRole.DECODE, FaultDomain.TRANSFER, OnFailure.RETRY, True, False),
        (WorkerRole.DECODE, FaultDomain.TRANSFER, OnFailure.LOCAL, True, True),
        (WorkerRole.DECODE, FaultDomain.TRANSFER, OnFailure.FAIL, False, False),
        (WorkerRole.DECODE, FaultDomain.WORKER, OnFailure.RETRY, True, False),
        (WorkerRole.DECODE, FaultDomain.WORKER, OnFailure.LOCAL, True, False),
        (WorkerRole.DECODE, FaultDomain.WORKER, OnFailure.FAIL, False, False),
        (WorkerRole.DECODE, FaultDomain.LOST, OnFailure.RETRY, True, False),
        (WorkerRole.PREFILL, FaultDomain.LOST, OnFailure.LOCAL, True, True),
        (WorkerRole.DECODE, FaultDomain.LOST, OnFailure.FAIL, False, False),
        (WorkerRole.DECODE, FaultDomain.REQUEST, OnFailure.RETRY, False, False),
        (WorkerRole.PREFILL, FaultDomain.REQUEST, OnFailure.LOCAL, False, False),
    ],
)
def test_what_is_tried_next(
    part: WorkerRole, fault_domain: FaultDomain, on_failure: OnFailure, again: bool, local: bool
) -> None:
    tried = AttemptState(attempts=1)
    assert next_try(tried, failure(part, fault_domain), on_failure, 2) is again
    assert tried.local is local
    spent = AttemptState(attempts=2)
    assert not next_try(spent, failure(part, fault_domain), on_failure, 2)


def test_a_request_that_two_workers_vanished_with_is_not_tried_again() -> None:
    tried = AttemptState(attempts=1)
    assert next_try(tried, failure(WorkerRole.PREFILL, FaultDomain.LOST), OnFailure.LOCAL, 9)
    assert next_try(tried, failure(WorkerRole.DECODE, FaultDomain.WORKER), OnFailure.LOCAL, 9)
    assert not next_try(tried, failure(WorkerRole.DECODE, FaultDomain.LOST), OnFailure.LOCAL, 9)


# ---------------------------------------------------------------- bodies and streams


def read(body: object, header: str | None = None) -> dict[str, object]:
    defaults = RequestDefaults(lambda model: model or "m", OnFailure.LOCAL, 5)
    call = parse_call("/v1/completions", json.dumps(body).encode(), header, defaults)
    sent: dict[str, object] = json.loads(KvferryAdapter().for_decode(call, 1, "p", 2.0))
    return sent | {"on_failure": call.on_failure}


def test_a_body_may_override_the_header() -> None:
    assert read({}, "retry")["on_failure"] is OnFailure.RETRY
    body = {"kvferry": {"on_failure": "fail"}}
    assert read(body, "retry")["on_failure"] is OnFailure.FAIL
    assert read({"kvferry": {}}, "retry")["on_failure"] is OnFailure.RETRY
    with pytest.raises(ApiError, match="on_failure must be"):
        read({}, "maybe")


def test_what_the_router_does_not_know_is_left_as_it_is() -> None:
    body = {"prompt": [1, 2], "anything": {"a": [None, 1.5]}, "seed": None}
    sent = read(body)
    assert sent["anything"] == body["anything"]
    assert sent["prompt"] == [1, 2]
    assert sent["seed"] == 5


@given(st.lists(st.binary(min_size=1, max_size=8)), st.lists(st.integers(1, 9)))
def test_events_are_passed_on_whole_and_unchanged(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"data: " + part.replace(b"\n", b"") + b"\n\n" for part in parts)
    events, sent, rest = WholeEvents(), b"", stream + b"data: half"
    for cut in [*cuts, len(rest)]:
        whole = events.take(rest[:cut])
        assert whole == b"" or whole.endswith(b"\n\n")
        sent, rest = sent + whole, rest[cut:]
    assert sent == stream


@pytest.mark.parametrize(
    ("stream", "ended"),
    [
        (b"data: 1\n\ndata: [DONE]", False),
        (b"data: 1\n\ndata: [DONE]\n\n", True),
        (b'data: 1\n\ndata: {"error": {}}\n\n', True),
        # What only keeps the connection open says nothing else.
        (b"data: [DONE]\n\n: still here\n\n", True),
        (b"data: [DONE]\n\ndata: 2\n\n", False),
    ],
)
def test_the_end_of_a_stream_is_known(stream: bytes, ended: bool) -> None:
    events = WholeEvents()
    for byte in stream:
        events.take(bytes([byte]))
    assert events.ended is ended


def test_events_may_end_as_windows_does() -> None:
    events = WholeEvents()
    assert events.take(b"data: 1\r\n\r\ndata: [DONE]\r\n\r\ndata") == (
        b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n"
    )
    assert events.ended


def test_an_event_without_an_end_fills_no_memory() -> None:
    events = WholeEvents(most_bytes=100)
    events.take(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="above 100 bytes"):
        events.take(b"x" * 90)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    "fields",
    [
        {"attempts": 0},
        {"deadline_s": 0},
        {"room_s": float("nan")},
        {"lost_s": 1e9},
        {"decode_urls": ("ftp://h:1",)},
        {"prefill_urls": ("http://h",)},
        {"prefill_urls": ("http://h:99999",)},
    ],
)
def test_bad_options_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InputError):
        RouterOptions(**fields)  # type: ignore[arg-type]
