"""The checks of the control channel, the key, discovery, and layouts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from cli.doctor.findings import only
from running import SHAPE

from kvferry.cli.doctor import DoctorRequest, State, cluster
from kvferry.cli.main import build_parser
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.errors import Reason
from kvferry.security.keys import ClusterKey

OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM


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
    assert "128 MiB for each endpoint are 2 slots of 64.0 MiB" in on_gpu["staging"]
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
