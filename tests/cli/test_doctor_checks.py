"""The checks of ``kvferry doctor`` on machines of many kinds."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zmq
from running import SHAPE

from kvferry.cli.doctor import (
    Area,
    DoctorRequest,
    Finding,
    State,
    cluster,
    devices,
    host,
    run_check,
)
from kvferry.cli.doctor.host import Capability, has_capability
from kvferry.cli.doctor.probes import probe_cma
from kvferry.cli.main import build_parser
from kvferry.discovery.server import DiscoveryServer
from kvferry.endpoint.control.sockets import ControlClient, ControlServer, new_context
from kvferry.errors import Reason, TransportError
from kvferry.security.keys import ClusterKey

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")
GIB = 1 << 30
OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM


def only(checks: Iterable[Finding]) -> Finding:
    (check,) = checks
    assert (check.remedy == "") == (check.state is OK)
    return check


def tree(root: Path, files: dict[str, str]) -> Path:
    """A machine's files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ---------------------------------------------------------------- checks that fail


AREA = Area("area")


def raising(error: Exception) -> Iterable[Finding]:
    yield AREA.ok("first", "fine")
    raise error


def test_an_exception_in_a_check_becomes_a_problem() -> None:
    found = only(run_check(AREA, "name", lambda: raising(RuntimeError("no luck"))))
    assert (found.area, found.name, found.state) == ("area", "name", PROBLEM)
    assert "RuntimeError: no luck" in found.detail


def test_an_error_of_kvferry_is_split_into_detail_and_remedy() -> None:
    error = TransportError("it is broken; mend it")
    assert run_check(AREA, "name", lambda: raising(error)) == [
        Finding("area", "name", PROBLEM, "it is broken", "mend it")
    ]


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
    check = only([host.judge_files(*limits, peers)])
    assert check.state is state
    assert says in check.detail


def test_the_remedy_for_open_files_names_the_hard_limit() -> None:
    assert host.judge_files(256, 4096, 100).remedy == "ulimit -n 928 before the engine starts"
    assert "hard limit is 512" in host.judge_files(256, 512, 100).remedy


@ON_LINUX
def test_a_peer_opens_at_most_the_assumed_number_of_files() -> None:
    """Both ends of a control connection are in this process, so this counts too many."""

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


@ON_LINUX
def test_a_child_really_tries_to_write_this_process() -> None:
    errors = host.try_cma()
    if has_capability(Capability.SYS_PTRACE):
        assert errors == [0]
    else:
        assert errors[0] in (0, errno.EPERM, errno.ENOSYS)


@ON_LINUX
def test_a_process_that_cannot_be_dumped_is_not_written() -> None:
    """A process that can't be dumped is closed to all but those who may trace anything."""

    code = (
        "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # PR_SET_DUMPABLE
        "from kvferry.cli.doctor import host; print(host.try_cma()[0])"
    )
    # What is dropped from the bounding set is lost with the next program (PR_CAPBSET_DROP).
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


# ---------------------------------------------------------------- copies, GPUs, RDMA


def test_a_slow_copy_loop_is_a_note() -> None:
    assert only([host.judge_copy_speed("6.0 GB/s", 0.86)]).state is OK
    assert only([host.judge_copy_speed("3.0 GB/s", 0.43)]).state is NOTE


SEEN = {"cuda": "13.0", "num_gpus": 2, "problem": ""}
BLIND = {"cuda": None, "num_gpus": 0, "problem": "AssertionError: not compiled with CUDA"}


@pytest.mark.parametrize(
    ("seen", "installed", "wanted", "state"),
    [
        (SEEN, "2.13.0", True, OK),
        (BLIND, "2.13.0", True, PROBLEM),
        (BLIND, "2.13.0", False, NOTE),
        (None, "2.13.0", False, OK),
        (None, None, False, OK),
        (None, None, True, PROBLEM),
    ],
)
def test_torch(seen: Any, installed: str | None, wanted: bool, state: State) -> None:
    assert only([devices.judge_torch(seen, installed, wanted)]).state is state


def test_expandable_segments_are_a_note() -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    told = only(devices.check_allocator({name: "max_split_size_mb:64,expandable_segments:True"}))
    assert (told.state, name in told.remedy) == (NOTE, True)
    assert list(devices.check_allocator({name: "expandable_segments:False"})) == []
    assert list(devices.check_allocator({})) == []


def test_gpudirect_needs_a_module_or_the_driver() -> None:
    assert (
        only([devices.judge_gpudirect("nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2\n")]).state
        is OK
    )
    assert only([devices.judge_gpudirect("nvidia 1 2\n")]).state is NOTE


def port(state: str) -> dict[str, str]:
    return {"state": f"{state}\n", "rate": "400 Gb/sec (4X NDR)\n", "link_layer": "InfiniBand\n"}


def test_rdma_ports_are_shown_with_link_and_rate(tmp_path: Path) -> None:
    base = f"{devices.INFINIBAND}/mlx5_"
    up = {f"{base}0/ports/1/{name}": text for name, text in port("4: ACTIVE").items()}
    down = {f"{base}1/ports/1/{name}": text for name, text in port("1: DOWN").items()}
    root = tree(tmp_path, {**up, **down, "dev/infiniband/uverbs0": ""})
    checks = list(devices.check_rdma(devices.rdma_ports(root), root))
    assert [(check.name, check.state) for check in checks] == [("mlx5_0", OK), ("mlx5_1", NOTE)]
    assert checks[0].detail == "mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"
    (root / "dev/infiniband/uverbs0").unlink()
    assert [check.name for check in devices.check_rdma(devices.rdma_ports(root), root)][
        -1
    ] == "access"


def test_a_machine_without_rdma(tmp_path: Path) -> None:
    assert devices.rdma_ports(tmp_path) == []
    assert only(devices.check_rdma([], tmp_path)).detail.startswith("none found")


# ---------------------------------------------------------------- control


def test_a_frame_crosses_the_control_channel() -> None:
    checks = {check.name: check for check in cluster.check_channel(DoctorRequest())}
    assert checks["zeromq"].state is OK
    assert "a frame came back" in checks["loopback"].detail


def test_a_discovery_service_with_a_key() -> None:
    right, wrong = ClusterKey.new(), ClusterKey.new()
    with DiscoveryServer("127.0.0.1", 0, right) as server:
        told = {check.name: check.state for check in cluster.check_discovery(server.url, right)}
        assert told == {"discovery": OK, "clocks": OK}
        none = only(cluster.check_discovery(server.url, None))
        assert (none.state, none.remedy) == (PROBLEM, "give it with --key or key=")
        other = only(cluster.check_discovery(server.url, wrong))
        assert (other.state, other.remedy) == (PROBLEM, "use the same file")


def test_an_unreachable_discovery_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        late = only(cluster.check_discovery(f"http://127.0.0.1:{port}", None))
        assert (late.state, "does not answer within" in late.detail) == (PROBLEM, True)
    gone = only(cluster.check_discovery(f"http://127.0.0.1:{port}", None))
    assert "cannot reach" in gone.detail
    assert "kvferry serve discovery" in gone.remedy


def test_a_missing_key_file(tmp_path: Path) -> None:
    asked = DoctorRequest(key_file=str(tmp_path / "nothing"))
    told = only(cluster.check_cluster(asked))
    assert (told.name, told.state, told.remedy) == ("cluster key", PROBLEM, "check the path")


@pytest.mark.parametrize(("apart_s", "state"), [(0.4, OK), (-1.2, OK), (45.0, NOTE), (-400, NOTE)])
def test_clocks_that_differ(apart_s: float, state: State) -> None:
    assert only([cluster.judge_clock_difference(apart_s)]).state is state


# ---------------------------------------------------------------- layouts


def pairing(words: str, **asked: str) -> cluster.Pairing:
    found = read(words, **asked)
    assert isinstance(found, cluster.Pairing)
    return found


def read(words: str, **asked: str) -> cluster.Pairing | tuple[Reason, ...] | None:
    args = build_parser().parse_args(["doctor", *words.split()])
    return cluster.read_pairing(args, DoctorRequest(**asked))


def told(words: str, **asked: str) -> dict[str, str]:
    checks = list(cluster.check_layouts(pairing(words, **asked)))
    assert all(check.state is OK for check in checks)
    return {check.name: check.detail for check in checks}


def test_no_layouts_no_findings() -> None:
    assert read("") is None


@pytest.mark.parametrize(
    ("words", "transport", "device", "path", "preset"),
    [
        ("--prefill tp=4 --decode tp=1", "nixl", "cpu", "staged", "nixl-host"),
        ("--prefill tp=4 --decode tp=1", "nixl", "cuda", "staged", "nixl-gpu"),
        ("--prefill tp=2 --decode tp=2", "nixl", "cpu", "runs", "nixl-host"),
        ("--prefill tp=4 --decode tp=1", "mooncake", "cpu", "staged", "mooncake"),
        ("--prefill tp=4 --decode tp=1", "shm", "cpu", "slices", "shm"),
        ("--prefill tp=4 --decode tp=1", "somebodys", "cpu", "staged", "nixl-host"),
    ],
)
def test_the_mode_follows_from_the_transports_cost_model(
    words: str, transport: str, device: str, path: str, preset: str
) -> None:
    details = told(f"{words} {SHAPE}", transport=transport, device=device)
    assert details["mode"].startswith(f"{path}: about")
    assert f"cost model {preset}" in details["mode"]


def test_staging_is_shown_if_the_plan_uses_it() -> None:
    staged = told(f"--prefill tp=4 --decode tp=1 {SHAPE}", transport="nixl")
    assert "64.0 MiB for each endpoint are 4 slots of 16.0 MiB" in staged["staging"]
    on_gpu = told(f"--prefill tp=4 --decode tp=1 {SHAPE}", transport="nixl", device="cuda")
    assert "64.0 MiB for each endpoint are 3 slots of 21.3 MiB" in on_gpu["staging"]
    equal = told(f"--prefill tp=2 --decode tp=2 {SHAPE}", transport="nixl")
    assert "not used here; staging_bytes=0" in equal["staging"]
    mapped = told(f"--prefill tp=4 --decode tp=1 {SHAPE}")
    assert mapped["staging"].startswith("none")


def test_a_fully_cached_prompt_needs_no_mode() -> None:
    words = f"--prefill tp=4 --decode tp=1,prefix=64 --tokens 64 {SHAPE}"
    assert set(told(words, transport="nixl")) == {"plan"}


def test_staging_that_is_too_small_is_a_note() -> None:
    shape = "--layers 2 --kv-heads 10240 --head-dim 512 --tokens 16"
    wide = pairing(f"--prefill order=nhd --decode order=hnd {shape}", transport="nixl")
    assert wide.costs.chosen == "staged"
    few = cluster.judge_staging(wide)
    assert (few.state, "only 3 slots" in few.detail) == (NOTE, True)
    none = cluster.judge_staging(wide, 8 << 20)
    assert (none.state, "hold no slot" in none.detail) == (NOTE, True)
    assert none.remedy.startswith("give staging more memory")


@pytest.mark.parametrize(
    ("sides", "peers"),
    [
        ("--prefill tp=1 --decode tp=1", 1),
        ("--prefill tp=4 --decode tp=1", 4),
        ("--prefill tp=4 --decode tp=1,dp=8", 8),
        ("--prefill tp=1 --decode tp=8,dp=4", 32),
    ],
)
def test_peers_are_counted_over_all_replicas(sides: str, peers: int) -> None:
    assert pairing(f"{sides} {SHAPE}").num_peers == peers


def test_reasons_are_findings_named_by_their_codes() -> None:
    reasons = read(f"--prefill tp=3 --decode tp=1 {SHAPE}")
    assert isinstance(reasons, tuple)
    check = only(cluster.check_layouts(reasons))
    assert (check.area, check.name, check.state) == ("layouts", "tp-does-not-fit-units", PROBLEM)
    assert check.detail.startswith("prefill: tp=3")
