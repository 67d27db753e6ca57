"""Failures of jobs, as the callers of a worker are told of them."""

from __future__ import annotations

from kvferry.http.api_errors import ApiError
from kvferry.reference.worker.jobs import JobFailed, Trouble

_STATUS = {
    Trouble.INVALID: (400, None),
    Trouble.TRANSFER: (503, "kv_transfer_failed"),
    Trouble.TIMEOUT: (504, "timeout"),
    Trouble.ENDED: (503, "worker_ended"),
    Trouble.LOST: (503, "worker_lost"),
    Trouble.BROKE_WORKER: (500, "request_broke_worker"),
    Trouble.SAMPLING: (500, "sampling_failed"),
}


def of_failure(failed: JobFailed) -> ApiError:
    """What the caller of a job that failed is told."""
    status, code = _STATUS[failed.trouble]
    return ApiError(status, failed.message, code=code)
