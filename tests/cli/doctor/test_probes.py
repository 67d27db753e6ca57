"""Probes in child processes: what they return, and how they fail."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from cli.doctor.packages import Packages

from kvferry.cli.doctor import DoctorRequest, State
from kvferry.cli.doctor.devices import check_gpus
from kvferry.cli.doctor.probes import ProbeFailed, probe_cma, run_probe

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")
HANGING = "import time\ntime.sleep(600)\n"


def test_a_hanging_probe_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = Packages(tmp_path)
    packages.add("hanging", HANGING)
    monkeypatch.syspath_prepend(packages.path)
    begin = time.monotonic()
    with pytest.raises(ProbeFailed, match="'transport hanging cpu' did not end within 1 s"):
        run_probe("transport", "hanging", "cpu", limit_s=1.0)
    assert time.monotonic() - begin < 30


def test_a_failed_probe_shows_its_last_line() -> None:
    with pytest.raises(ProbeFailed, match=r"ended with status 1 \(KeyError: 'no-such-probe'\)"):
        run_probe("no-such-probe", limit_s=30.0)


def test_a_probe_that_cannot_be_started_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ProbeFailed, match=r"'gpus' can't be started .*No such file") as failed:
        run_probe("gpus", limit_s=30.0)
    probe = Future[dict[str, Any]]()
    probe.set_exception(failed.value)
    (found,) = check_gpus(DoctorRequest(), probe, has_rdma=False)
    assert (found.state, found.name) == (State.NOTE, "cards")


@ON_LINUX
def test_the_probe_writes_its_text() -> None:
    buffer = ctypes.create_string_buffer(8)
    assert probe_cma(str(os.getpid()), str(ctypes.addressof(buffer)), "written") == {"errno": 0}
    assert buffer.value == b"written"


@ON_LINUX
def test_the_probe_returns_the_error_number() -> None:
    assert probe_cma(str(os.getpid()), "4096", "text") == {"errno": errno.EFAULT}
    buffer = ctypes.create_string_buffer(8)
    nobody = str(2**22 + 1)
    told = probe_cma(nobody, str(ctypes.addressof(buffer)), "text")
    assert told == {"errno": errno.ESRCH}
    assert buffer.value == b""
