"""The checks of GPUs and RDMA devices, on machines of many kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.doctor.findings import only

from kvferry.cli.doctor import State, devices

OK, NOTE, PROBLEM = State.OK, State.NOTE, State.PROBLEM


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write a machine's files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


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
