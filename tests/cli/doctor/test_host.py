"""The checks of the host, on machines of many kinds."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from cli.doctor.findings import only

from kvferry.cli.doctor import DoctorRequest, State, host
from kvferry.cli.doctor.host import Capability, has_capability
from kvferry.endpoint.control.sockets import ControlClient, ControlServer, new_context
from kvferry.security.keys import ClusterKey

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")
GIB = 1 << 30
OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM


# ---------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("limits", "peers", "state", "says"),
    [
        ((1024, 4096), None, OK, "about 112 peers"),
        ((256, 4096), None, NOTE, "about 16 peers, not for 64"),
        ((1024, 4096), 112, OK, "about 112"),
        ((1024, 4096), 113, PROBLEM, "not for 113"),
        ((64, 64), 1, PROBLEM, "about 0 peers"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 10**6, OK, "any number"),
    ],
)
def test_open_files(limits: tuple[int, int], peers: int | None, state: State, says: str) -> None:
    check = only([host.check_files(peers, limits)])
    assert check.state is state
    assert says in check.detail


def test_the_remedy_for_open_files_names_the_hard_limit() -> None:
    assert host.check_files(100, (256, 4096)).remedy == "ulimit -n 928 before the engine starts"
    assert "hard limit is 512" in host.check_files(100, (256, 512)).remedy


@ON_LINUX
def test_a_peer_opens_at_most_the_assumed_number_of_files() -> None:
    """This counts both ends of each control connection, so it is an upper bound."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    count, key, context = 8, ClusterKey.new(), new_context()
    server = ControlServer("127.0.0.1", 0, key)
    before = opened()
    clients = [ControlClient(server.address, key, context) for _ in range(count)]
    for client in clients:
        client.send(b"here")
    num_frames, give_up = 0, time.monotonic() + 30
    while num_frames < count and time.monotonic() < give_up:
        zmq.select(list(server.sockets), [], [], 0.1)
        num_frames += len(server.receive())
    used = opened() - before
    for client in clients:
        client.close(0)
    server.close(0)
    context.destroy(0)
    assert num_frames == count
    assert count < used < count * host.FILES_PER_PEER


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("free", "total", "request_bytes", "state"),
    [
        (8 * GIB, 16 * GIB, None, OK),
        (8 * GIB, 16 * GIB, 2 * GIB, OK),
        (1 * GIB, 16 * GIB, 2 * GIB, PROBLEM),
        (64 << 20, 64 << 20, None, NOTE),
        (64 << 20, 64 << 20, 1 << 20, NOTE),
    ],
)
def test_size_of_shared_memory(
    free: int, total: int, request_bytes: int | None, state: State
) -> None:
    request = DoctorRequest(transport="shm")
    assert only([host.judge_shm(free, total, request, request_bytes)]).state is state


@pytest.mark.parametrize(
    ("transport", "free", "state"),
    [
        ("nixl", 16 << 20, PROBLEM),
        ("nixl", 1 * GIB, OK),
        ("mooncake", 16 << 20, OK),
        ("shm", 1 * GIB, PROBLEM),
        ("shm,nixl", 1 * GIB, PROBLEM),
    ],
)
def test_each_transport_needs_its_own_share_of_shared_memory(
    transport: str, free: int, state: State
) -> None:
    request = DoctorRequest(transport=transport)
    assert only([host.judge_shm(free, 2 * GIB, request, 10**12)]).state is state


@pytest.mark.parametrize(
    ("limit", "may", "needed", "state"),
    [
        (host.UNLIMITED, False, True, OK),
        (8 << 20, True, True, OK),
        (8 << 20, False, False, OK),
        (8 << 20, False, True, PROBLEM),
    ],
)
def test_pinned_memory(limit: int, may: bool, needed: bool, state: State) -> None:
    assert only([host.judge_pinned(limit, may, needed=needed)]).state is state


@pytest.mark.parametrize(
    ("text", "state"),
    [("always [madvise] never\n", OK), ("always madvise [never]\n", NOTE), (None, OK)],
)
def test_huge_pages(tmp_path: Path, text: str | None, state: State) -> None:
    switch = tmp_path / "enabled"
    if text is not None:
        switch.write_text(text)
    assert only([host.check_huge_pages(switch)]).state is state


def test_capabilities_are_read_from_the_mask_in_effect(tmp_path: Path) -> None:
    status = "Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000080000\n"
    path = tmp_path / "status"
    path.write_text(status)
    assert has_capability(Capability.SYS_PTRACE, path)
    assert not has_capability(Capability.IPC_LOCK, path)
    assert not has_capability(Capability.SYS_PTRACE, tmp_path / "elsewhere")


# ---------------------------------------------------------------- one-copy writes


@ON_LINUX
def test_a_child_really_tries_to_write_this_process() -> None:
    errors = host.try_cma()
    if has_capability(Capability.SYS_PTRACE):
        assert errors == [0]
    else:
        assert errors[0] in (0, errno.EPERM, errno.ENOSYS)


@ON_LINUX
def test_a_process_that_cannot_be_dumped_is_not_written() -> None:
    """Only CAP_SYS_PTRACE may write a process that is not dumpable."""

    code = (
        "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # PR_SET_DUMPABLE
        "from kvferry.cli.doctor import host; print(host.try_cma()[0])"
    )
    # A capability dropped from the bounding set is gone after exec (PR_CAPBSET_DROP).
    launch = (
        f"import ctypes, os, sys; ctypes.CDLL(None).prctl(24, {Capability.SYS_PTRACE:d}, 0, 0, 0)\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", launch], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) == errno.EPERM


@pytest.mark.parametrize(
    ("tried", "scope", "state", "says"),
    [
        ([0], "0", OK, "may write each other's memory"),
        ([errno.EPERM, 0], "1", OK, "that permits it"),
        ([errno.EPERM, errno.EPERM], "1", NOTE, "EPERM; ptrace_scope 1"),
        ([errno.EPERM], None, NOTE, "ptrace_scope absent"),
        ([errno.ENOSYS], None, NOTE, "ENOSYS"),
        ([-1], "2", NOTE, "nothing written"),
        ([errno.EPERM, errno.EPERM], "3", NOTE, "over TCP"),
    ],
)
def test_cma_trials(tried: list[int], scope: str | None, state: State, says: str) -> None:
    check = only([host.judge_cma(tried, scope, has_ptrace=False)])
    assert check.state is state
    assert says in check.detail


def test_each_ptrace_scope_has_its_remedy() -> None:
    told = {scope: host.judge_cma([1], scope, has_ptrace=False).remedy for scope in "123"}
    assert "--cap-add SYS_PTRACE" in told["1"]
    assert "sysctl kernel.yama.ptrace_scope=1" in told["2"]
    assert "next boot" in told["3"]


# ---------------------------------------------------------------- copies


def test_a_slow_copy_loop_is_a_note() -> None:
    assert only([host.judge_copy_speed("6.0 GB/s", 0.86)]).state is OK
    assert only([host.judge_copy_speed("3.0 GB/s", 0.43)]).state is NOTE
