"""Running cases: results, servers that fail, and the end of time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from gpu_engines.checklist import (
    Case,
    CaseFailed,
    CaseReport,
    OutOfTime,
    Status,
    exit_status,
    expect_equal,
    needed,
    run_cases,
    table,
)
from gpu_engines.servers import Servers, Spec

from kvferry.testing.ports import later_port

NOTHING: list[str] = []
SERVE = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]


def good(seen: list[str]) -> str:
    seen.append("good")
    return "as expected"


def bad(seen: list[str]) -> str:
    raise CaseFailed("3 of 4 tokens agree")


def broken(seen: list[str]) -> str:
    raise KeyError("choices")


def endless(seen: list[str]) -> str:
    raise OutOfTime


def served(name: str, *command: str) -> Spec:
    port = later_port()
    return Spec(name, command or (*SERVE, str(port)), port, os.environ, "/")


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def test_a_failed_case_does_not_stop_the_others(servers: Servers) -> None:
    seen: list[str] = []
    cases = [Case(bad, ()), Case(broken, ()), Case(good, (), "needs a GPU"), Case(good, ())]
    reports = run_cases(cases, seen, servers)
    assert [report.status for report in reports] == ["FAILED", "FAILED", "not run", "ok"]
    assert [report.detail for report in reports[::2]] == ["3 of 4 tokens agree", "needs a GPU"]
    assert "KeyError: 'choices' (broken, line" in reports[1].detail
    assert seen == ["good"]


def test_cases_after_the_end_of_time_fail(servers: Servers) -> None:
    reports = run_cases([Case(endless, ()), Case(good, ())], NOTHING, servers)
    assert [report.status for report in reports] == [Status.FAILED, Status.FAILED]


def test_a_server_that_ends_fails_its_cases(servers: Servers) -> None:
    with servers:
        servers.start([served("dead", sys.executable, "-c", "raise SystemExit('no GPU')")])
        servers.start([served("alive")])
        servers.wait(30.0)
        cases = [Case(good, ("dead",)), Case(good, ("alive",))]
        assert needed(cases) == ["dead", "alive"]
        reports = run_cases(cases, NOTHING, servers)
    assert [report.status for report in reports] == [Status.FAILED, Status.OK]
    assert reports[0].detail == "server dead did not start"
    assert servers.starts["dead"] == "it ended with status 1: no GPU"
    assert isinstance(servers.starts["alive"], float)


def test_servers_end_with_their_last_case(servers: Servers) -> None:
    with servers:
        servers.start([served("first"), served("second")])
        servers.wait(30.0)
        first, second = servers["first"].process, servers["second"].process

        def both_run(_: list[str]) -> str:
            return f"{first.poll()} {second.poll()}"

        def one_runs(_: list[str]) -> str:
            return f"{first.poll() is None} {second.poll()}"

        reports = run_cases(
            [Case(both_run, ("first",)), Case(one_runs, ("second",))], NOTHING, servers
        )
        assert [report.detail for report in reports] == ["None None", "False None"]
    assert second.poll() is not None


def test_a_server_that_is_late_is_given_up(servers: Servers) -> None:
    with servers:
        servers.start([served("silent", sys.executable, "-c", "import time; time.sleep(60)")])
        servers.wait(0.5)
        assert str(servers["silent"].failure).startswith("not up after 0 s")


def test_the_exit_status_says_whether_anything_failed() -> None:
    reports = {status: CaseReport("case", status, "", 0.0) for status in Status}
    assert exit_status([reports[Status.OK], reports[Status.NOT_RUN]]) == 0
    assert exit_status([reports[Status.OK], reports[Status.FAILED]]) == 1
    assert exit_status([reports[Status.NOT_RUN]]) == 1


def test_different_answers_fail() -> None:
    expect_equal([1, 2], [1, 2], "the same")
    with pytest.raises(CaseFailed, match="17 tokens: 1 of 2 tokens agree"):
        expect_equal([1, 3], [1, 2], "17 tokens")
    with pytest.raises(CaseFailed):
        expect_equal([1], [1, 2], "too short")
    with pytest.raises(CaseFailed):
        expect_equal([], [], "no answer at all")


def test_tables_align() -> None:
    assert table([{"case": "a", "result": "ok"}, {"case": "longer", "result": "FAILED"}]) == (
        "case    result\na       ok\nlonger  FAILED"
    )
    assert table([]) == ""
