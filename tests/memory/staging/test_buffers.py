"""Tests that staging memory is aligned, zeroed, and kept alive by its owner."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import InputError
from kvferry.memory.staging import allocate
from kvferry.memory.staging.buffers import HUGE_PAGE_BYTES
from kvferry.regions import HOST, Device

HAS_GPU = importlib.util.find_spec("torch") is not None and Path("/dev/nvidiactl").exists()


@pytest.mark.parametrize("num_bytes", [1, 4096, 5 << 20])
def test_host_memory_is_aligned_zeroed_and_writable(num_bytes: int) -> None:
    region, owner = allocate(num_bytes)
    assert (region.num_bytes, region.device) == (num_bytes, HOST)
    assert region.address % HUGE_PAGE_BYTES == 0
    view = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(region.address))
    assert not view.any()
    view[:] = 7
    assert isinstance(owner, np.ndarray)
    assert (owner == 7).all()


def test_the_owner_keeps_the_memory() -> None:
    buffers = [allocate(1 << 20) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        ctypes.memset(buffer.region.address, number + 1, buffer.region.num_bytes)
    gc.collect()
    ends = [buffer.region.end - 1 for buffer in buffers]
    assert [ctypes.c_uint8.from_address(end).value for end in ends] == list(range(1, 9))


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_empty_buffer_is_refused(num_bytes: int) -> None:
    with pytest.raises(InputError, match="1 byte or more"):
        allocate(num_bytes)


def test_missing_gpu_is_refused() -> None:
    with pytest.raises(InputError, match=r"no cuda:99 on this machine|needs torch"):
        allocate(4096, Device("cuda", 99))


@pytest.mark.skipif(not HAS_GPU, reason="needs torch and a GPU")
def test_gpu_memory() -> None:
    region, owner = allocate(1 << 20, Device("cuda", 0))
    assert (region.num_bytes, str(region.device)) == (1 << 20, "cuda:0")
    assert region.address % 256 == 0
    assert owner is not None


def test_host_memory_does_not_import_torch() -> None:
    code = (
        "import sys; from kvferry.memory.staging import allocate; allocate(1); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert told.stdout == b"False\n", told.stderr
