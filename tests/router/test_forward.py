"""The decision what to try after a failed attempt."""

from __future__ import annotations

import pytest

from kvferry.router.forward import AttemptState, next_try
from kvferry.router.options import OnFailure
from kvferry.router.upstream import FailedAttempt, FaultDomain
from kvferry.router.worker_pool import Worker, WorkerRole


def failure(role: WorkerRole, fault_domain: FaultDomain) -> FailedAttempt:
    return FailedAttempt(Worker("u", role, "n", fixed=True), fault_domain, "why")


@pytest.mark.parametrize(
    ("role", "fault_domain", "on_failure", "again", "local"),
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
        (WorkerRole.PREFILL, FaultDomain.REJECTED, OnFailure.LOCAL, True, False),
        (WorkerRole.PREFILL, FaultDomain.REJECTED, OnFailure.FAIL, True, False),
    ],
)
def test_next_try_follows_fault_domain_and_policy(
    role: WorkerRole, fault_domain: FaultDomain, on_failure: OnFailure, again: bool, local: bool
) -> None:
    tried = AttemptState(attempts=1)
    assert next_try(tried, failure(role, fault_domain), on_failure, 2) is again
    assert tried.local is local
    spent = AttemptState(attempts=2)
    assert not next_try(spent, failure(role, fault_domain), on_failure, 2)


def test_two_lost_workers_end_the_request() -> None:
    tried = AttemptState(attempts=1)
    assert next_try(tried, failure(WorkerRole.PREFILL, FaultDomain.LOST), OnFailure.LOCAL, 9)
    assert next_try(tried, failure(WorkerRole.DECODE, FaultDomain.WORKER), OnFailure.LOCAL, 9)
    assert not next_try(tried, failure(WorkerRole.DECODE, FaultDomain.LOST), OnFailure.LOCAL, 9)
