"""Cases, each ok, failed or not run with the reason, and the figures that some measure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from gpu_engines.servers import Servers, say

R = TypeVar("R")


class Status(StrEnum):
    """How a case ended."""

    OK = "ok"
    FAILED = "FAILED"
    NOT_RUN = "not run"


class CaseFailed(Exception):
    """A case saw something wrong."""


class OutOfTime(BaseException):
    """The run's time is over. No case catches it."""


class CaseReport(NamedTuple):
    """The end of one case."""

    name: str
    status: Status
    detail: str
    seconds: float


class Case(NamedTuple, Generic[R]):
    """A check, the servers that it needs, and why it is left out here, if it is.

    A case that is ``on_request`` has servers of its own and runs only if ``--only`` names it.
    """

    check: Callable[[R], str]
    needs: tuple[str, ...]
    left_out: str | None = None
    on_request: bool = False

    @property
    def name(self) -> str:
        """Return the name of the check."""
        return self.check.__name__


def run_cases(cases: Sequence[Case[R]], context: R, servers: Servers) -> list[CaseReport]:
    """Run cases in order. End servers that no later case needs, to leave the machine quiet."""
    reports: list[CaseReport] = []
    for number, case in enumerate(cases):
        try:
            report = _run(case, context, servers)
        except OutOfTime:
            reports.append(CaseReport(case.name, Status.FAILED, "time ran out in this case", 0.0))
            late = "the time was over before"
            reports += [CaseReport(c.name, Status.FAILED, late, 0.0) for c in cases[number + 1 :]]
            break
        reports.append(report)
        if report.status is not Status.NOT_RUN:
            say(f"{report.status:>7} {report.name} ({report.seconds:.1f} s) {report.detail}")
        later = {name for case in cases[number + 1 :] for name in case.needs}
        servers.stop([name for name in servers.names() if name not in later])
    return reports


def _run(case: Case[R], context: R, servers: Servers) -> CaseReport:
    if case.left_out is not None:
        return CaseReport(case.name, Status.NOT_RUN, case.left_out, 0.0)
    for name in case.needs:
        if not servers[name].is_up:
            return CaseReport(case.name, Status.FAILED, f"server {name} did not start", 0.0)
    began = time.monotonic()
    try:
        status, detail = Status.OK, case.check(context)
    except CaseFailed as failure:
        status, detail = Status.FAILED, str(failure)
    except Exception as error:  # A case that breaks must not keep the others from running.
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        status = Status.FAILED
    return CaseReport(case.name, status, detail[:600], time.monotonic() - began)


def needed(cases: Iterable[Case[Any]]) -> list[str]:
    """Return the servers that cases need, in the order of their first use."""
    names = [name for case in cases if case.left_out is None for name in case.needs]
    return list(dict.fromkeys(names))


def exit_status(reports: Sequence[CaseReport]) -> int:
    """Return 1 if a case failed or none was run."""
    if any(report.status is Status.FAILED for report in reports):
        return 1
    return 0 if any(report.status is Status.OK for report in reports) else 1


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as lines of aligned columns."""
    if not rows:
        return ""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def agreement(got: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many tokens agree before the first difference."""
    pairs = zip(got, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(wanted)))


def expect_equal(got: Sequence[int], wanted: Sequence[int], what: str) -> None:
    """Raise ``CaseFailed`` if two answers differ."""
    if list(got) != list(wanted) or not wanted:
        agree = agreement(got, wanted)
        raise CaseFailed(f"{what}: {agree} of {len(wanted)} tokens agree: {got[:8]}, {wanted[:8]}")


def expect(holds: bool, what: str) -> None:
    """Raise ``CaseFailed`` unless a condition holds."""
    if not holds:
        raise CaseFailed(what)


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> float:
    """Return the seconds until a condition holds. Raises ``CaseFailed`` if it takes too long."""
    began = time.monotonic()
    while not holds():
        expect(time.monotonic() < began + timeout_s, f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began
