"""What ``kvferry doctor`` makes of what it finds, machine by machine."""

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

from kvferry.cli.doctor.checks import (
    control,
    copies,
    fit,
    gpus,
    machine,
    memory,
    probes,
    rdma,
    rights,
)
from kvferry.cli.doctor.checks.capabilities import Capability, has_capability
from kvferry.cli.doctor.checks.check import Asked, Check, Look, State, findings
from kvferry.cli.main import build_parser
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.endpoint.control.sockets import ControlClient, ControlServer, new_context
from kvferry.errors import Reason, TransportError
from kvferry.security.keys import ClusterKey

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")
GIB = 1 << 30
OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM


def only(checks: Iterable[Check]) -> Check:
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


# ---------------------------------------------------------------- looks that fail


def raising(error: Exception) -> Iterable[Check]:
    yield Check("a", "first", OK, "fine")
    raise error


def test_a_look_that_raises_is_a_problem_with_its_text() -> None:
    check = only(findings(Look("area", "name", lambda: raising(RuntimeError("no luck")))))
    assert (check.area, check.name, check.state) == ("area", "name", PROBLEM)
    assert "RuntimeError: no luck" in check.detail


def test_the_sentence_of_our_own_error_is_divided() -> None:
    error = TransportError("it is broken; mend it")
    assert findings(Look("area", "name", lambda: raising(error))) == [
        Check("area", "name", PROBLEM, "it is broken", "mend it")
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
    check = only([machine.judge_files(*limits, peers)])
    assert check.state is state
    assert says in check.detail


def test_the_remedy_for_open_files_says_who_can() -> None:
    assert machine.judge_files(256, 4096, 100).remedy == "ulimit -n 928 before the engine starts"
    assert "hard limit is 512" in machine.judge_files(256, 512, 100).remedy


@ON_LINUX
def test_a_peer_takes_no_more_files_than_is_counted() -> None:
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
    assert count < used < count * machine.FILES_PER_PEER


@pytest.mark.parametrize(
    ("now", "resolution_s", "source", "state"),
    [
        (machine.EARLIEST + 1, 1e-9, "tsc", OK),
        (machine.EARLIEST + 1, 1e-9, None, OK),
        (86400.0, 1e-9, "tsc", NOTE),
        (machine.EARLIEST + 1, 1e-2, "tsc", NOTE),
        (machine.EARLIEST + 1, 1e-9, "hpet", NOTE),
    ],
)
def test_clocks(now: float, resolution_s: float, source: str | None, state: State) -> None:
    assert only([machine.judge_clock(now, resolution_s, source)]).state is state


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
def test_room_in_shared_memory(
    free: int, total: int, request_bytes: int | None, state: State
) -> None:
    needed = memory.need(Asked(transport="shm"), request_bytes)
    assert only([memory.judge_room(free, total, needed)]).state is state


def test_what_each_transport_takes_of_shared_memory() -> None:
    assert memory.need(Asked(transport="shm"), None) is None
    assert memory.need(Asked(transport="mooncake"), 10**12) is None
    little = memory.need(Asked(transport="nixl"), 10**12)
    assert only([memory.judge_room(16 << 20, 2 * GIB, little)]).state is PROBLEM
    assert only([memory.judge_room(1 * GIB, 2 * GIB, little)]).state is OK


@pytest.mark.parametrize(
    ("limit", "may", "needed", "state"),
    [
        (None, False, True, OK),
        (8 << 20, True, True, OK),
        (8 << 20, False, False, OK),
        (8 << 20, False, True, PROBLEM),
    ],
)
def test_pinned_memory(limit: int | None, may: bool, needed: bool, state: State) -> None:
    assert only([memory.judge_pinned(limit, may, needed=needed)]).state is state


@pytest.mark.parametrize(
    ("text", "state"),
    [("always [madvise] never\n", OK), ("always madvise [never]\n", NOTE), (None, OK)],
)
def test_huge_pages(tmp_path: Path, text: str | None, state: State) -> None:
    root = tree(tmp_path, {} if text is None else {memory.HUGE: text})
    assert only(memory.huge_pages(root)).state is state


def test_capabilities_are_read_from_the_mask_in_effect(tmp_path: Path) -> None:
    status = "Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000080000\n"
    root = tree(tmp_path, {"proc/self/status": status})
    assert has_capability(Capability.SYS_PTRACE, root)
    assert not has_capability(Capability.IPC_LOCK, root)
    assert not has_capability(Capability.SYS_PTRACE, tmp_path / "elsewhere")


# ---------------------------------------------------------------- one-copy writes


@ON_LINUX
def test_the_probe_turns_every_bit() -> None:
    buffer = ctypes.create_string_buffer(bytes(range(256)), 256)
    told = probes.cma(str(os.getpid()), str(ctypes.addressof(buffer)), "256")
    assert told == {"errno": 0}
    assert buffer.raw == bytes(255 - value for value in range(256))


@ON_LINUX
def test_the_probe_tells_why_it_could_not() -> None:
    assert probes.cma(str(os.getpid()), "4096", "64") == {"errno": errno.EFAULT}
    buffer = ctypes.create_string_buffer(8)
    nobody = str(2**22 + 1)
    assert probes.cma(nobody, str(ctypes.addressof(buffer)), "8") == {"errno": errno.ESRCH}


@ON_LINUX
def test_a_child_really_tries_to_write_us() -> None:
    tried = rights.attempt()
    if has_capability(Capability.SYS_PTRACE):
        assert tried == rights.CmaTrial(0)
    else:
        assert tried.stranger in (0, errno.EPERM, errno.ENOSYS)


@ON_LINUX
def test_a_process_that_hides_its_memory_is_not_written() -> None:
    """A process that can't be dumped is closed to all but those who may trace anything."""

    code = (
        "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # PR_SET_DUMPABLE
        "from kvferry.cli.doctor.checks import rights; print(rights.attempt().stranger)"
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
        (rights.CmaTrial(0), "0", OK, "may write each other's memory"),
        (rights.CmaTrial(errno.EPERM, 0), "1", OK, "that permits it"),
        (rights.CmaTrial(errno.EPERM, errno.EPERM), "1", NOTE, "EPERM; ptrace_scope 1"),
        (rights.CmaTrial(errno.EPERM), None, NOTE, "ptrace_scope absent"),
        (rights.CmaTrial(errno.ENOSYS), None, NOTE, "ENOSYS"),
        (rights.CmaTrial(-1), "2", NOTE, "nothing written"),
        (rights.CmaTrial(errno.EPERM, errno.EPERM), "3", NOTE, "over TCP"),
    ],
)
def test_rights(tried: rights.CmaTrial, scope: str | None, state: State, says: str) -> None:
    check = only([rights.judge(tried, scope, may=False)])
    assert check.state is state
    assert says in check.detail


def test_each_ptrace_scope_has_its_remedy() -> None:
    told = {scope: rights.judge(rights.CmaTrial(1), scope, may=False).remedy for scope in "123"}
    assert "--cap-add SYS_PTRACE" in told["1"]
    assert "sysctl kernel.yama.ptrace_scope=1" in told["2"]
    assert "next boot" in told["3"]


# ---------------------------------------------------------------- copies, GPUs, RDMA


def test_a_slow_copy_loop_is_a_note() -> None:
    assert only([copies.judge_speed(6e9, 7e9)]).state is OK
    assert only([copies.judge_speed(3e9, 7e9)]).state is NOTE


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
    assert only([gpus.judge_torch(seen, installed, wanted)]).state is state


def test_expandable_segments_are_told() -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    told = only(gpus.allocator({name: "max_split_size_mb:64,expandable_segments:True"}))
    assert (told.state, name in told.remedy) == (NOTE, True)
    assert list(gpus.allocator({name: "expandable_segments:False"})) == []
    assert list(gpus.allocator({})) == []


def test_gpudirect_needs_a_module_or_the_driver() -> None:
    assert only([gpus.direct("nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2\n")]).state is OK
    assert only([gpus.direct("nvidia 1 2\n")]).state is NOTE


def port(state: str) -> dict[str, str]:
    return {"state": f"{state}\n", "rate": "400 Gb/sec (4X NDR)\n", "link_layer": "InfiniBand\n"}


def test_rdma_ports_are_told_with_link_and_rate(tmp_path: Path) -> None:
    base = f"{rdma.CLASS}/mlx5_"
    up = {f"{base}0/ports/1/{name}": text for name, text in port("4: ACTIVE").items()}
    down = {f"{base}1/ports/1/{name}": text for name, text in port("1: DOWN").items()}
    root = tree(tmp_path, {**up, **down, "dev/infiniband/uverbs0": ""})
    checks = list(rdma.devices(rdma.ports(root), root))
    assert [(check.name, check.state) for check in checks] == [("mlx5_0", OK), ("mlx5_1", NOTE)]
    assert checks[0].detail == "mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"
    (root / "dev/infiniband/uverbs0").unlink()
    assert [check.name for check in rdma.devices(rdma.ports(root), root)][-1] == "access"


def test_a_machine_without_rdma(tmp_path: Path) -> None:
    assert rdma.ports(tmp_path) == []
    assert only(rdma.devices([], tmp_path)).detail.startswith("none found")


# ---------------------------------------------------------------- control


def test_the_channel_is_really_tried() -> None:
    checks = {check.name: check for check in control.channel(Asked())}
    assert checks["zeromq"].state is OK
    assert "a frame came back" in checks["loopback"].detail


def test_a_discovery_that_wants_a_key() -> None:
    right, wrong = ClusterKey.new(), ClusterKey.new()
    with DiscoveryServer("127.0.0.1", 0, right) as server:
        told = {check.name: check.state for check in control.discovery(server.url, right)}
        assert told == {"discovery": OK, "clocks": OK}
        none = only(control.discovery(server.url, None))
        assert (none.state, none.remedy) == (PROBLEM, "give it with --key or key=")
        other = only(control.discovery(server.url, wrong))
        assert (other.state, other.remedy) == (PROBLEM, "use the same file")


def test_a_discovery_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        late = only(control.discovery(f"http://127.0.0.1:{port}", None))
        assert (late.state, "does not answer within" in late.detail) == (PROBLEM, True)
    gone = only(control.discovery(f"http://127.0.0.1:{port}", None))
    assert "cannot reach" in gone.detail
    assert "kvferry serve discovery" in gone.remedy


def test_a_key_file_that_is_none(tmp_path: Path) -> None:
    asked = Asked(key_file=str(tmp_path / "nothing"))
    told = only(control.cluster(asked))
    assert (told.name, told.state, told.remedy) == ("cluster key", PROBLEM, "check the path")


@pytest.mark.parametrize(("apart_s", "state"), [(0.4, OK), (-1.2, OK), (45.0, NOTE), (-400, NOTE)])
def test_clocks_that_differ(apart_s: float, state: State) -> None:
    assert only([control.judge_clocks(apart_s)]).state is state


# ---------------------------------------------------------------- layouts


def pairing(words: str, **asked: str) -> fit.Pairing:
    found = read(words, **asked)
    assert isinstance(found, fit.Pairing)
    return found


def read(words: str, **asked: str) -> fit.Pairing | tuple[Reason, ...] | None:
    args = build_parser().parse_args(["doctor", *words.split()])
    return fit.read_pairing(args, Asked(**asked))


def told(words: str, **asked: str) -> dict[str, str]:
    checks = list(fit.fitting(pairing(words, **asked)))
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
def test_the_path_follows_from_the_transports_figures(
    words: str, transport: str, device: str, path: str, preset: str
) -> None:
    details = told(f"{words} {SHAPE}", transport=transport, device=device)
    assert details["path"].startswith(f"{path}: about")
    assert f"figures of {preset}" in details["path"]


def test_staging_is_told_where_it_is_of_use() -> None:
    staged = told(f"--prefill tp=4 --decode tp=1 {SHAPE}", transport="nixl")
    assert "64.0 MiB for each endpoint are 4 slots of 16.0 MiB" in staged["staging"]
    on_gpu = told(f"--prefill tp=4 --decode tp=1 {SHAPE}", transport="nixl", device="cuda")
    assert "64.0 MiB for each endpoint are 3 slots of 21.3 MiB" in on_gpu["staging"]
    equal = told(f"--prefill tp=2 --decode tp=2 {SHAPE}", transport="nixl")
    assert "of no use here; staging_bytes=0" in equal["staging"]
    mapped = told(f"--prefill tp=4 --decode tp=1 {SHAPE}")
    assert mapped["staging"].startswith("none")


def test_a_fully_cached_prompt_needs_no_path() -> None:
    words = f"--prefill tp=4 --decode tp=1,prefix=64 --tokens 64 {SHAPE}"
    assert set(told(words, transport="nixl")) == {"plan"}


def test_staging_that_is_too_small_is_a_note() -> None:
    shape = "--layers 2 --kv-heads 10240 --head-dim 512 --tokens 16"
    wide = pairing(f"--prefill order=nhd --decode order=hnd {shape}", transport="nixl")
    assert wide.costs.chosen == "staged"
    few = fit.staging(wide)
    assert (few.state, "only 3 slots" in few.detail) == (NOTE, True)
    none = fit.staging(wide, 8 << 20)
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


def test_reasons_are_told_under_their_codes() -> None:
    reasons = read(f"--prefill tp=3 --decode tp=1 {SHAPE}")
    assert isinstance(reasons, tuple)
    check = only(fit.refused(reasons))
    assert (check.area, check.name, check.state) == ("layouts", "tp-does-not-fit-units", PROBLEM)
    assert check.detail.startswith("prefill: tp=3")
