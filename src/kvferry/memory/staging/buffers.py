"""Memory for staging, on the host or on a GPU.

A buffer keeps its memory alive. It must outlive every write that may still touch it.
"""

from __future__ import annotations

import importlib
import mmap
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from kvferry.errors import InputError
from kvferry.regions import HOST, Device, Region

# Alignment of huge pages. With small pages, address translation makes copies several percent
# slower, and pinning takes longer.
HUGE_PAGE_BYTES = 2 << 20


class Buffer(NamedTuple):
    """A region, and the object that keeps its memory alive."""

    region: Region
    owner: object


def allocate(num_bytes: int, device: Device = HOST) -> Buffer:
    """Return memory on a device. On the host it is zeroed, and has huge pages if possible."""
    if num_bytes <= 0:
        raise InputError(f"a buffer needs 1 byte or more, not {num_bytes}")
    return _host(num_bytes) if device.is_host else _cuda(num_bytes, device)


def _host(num_bytes: int) -> Buffer:
    # Private, so that a forked child cannot write into the parent's slots.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE_BYTES
    array = whole[first : first + num_bytes]
    return Buffer(Region(array.ctypes.data, num_bytes), array)


def _cuda(num_bytes: int, device: Device) -> Buffer:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise InputError(
            f"staging on {device} needs torch; install kvferry[torch], or use host memory"
        ) from None
    if not torch.cuda.is_available() or device.number >= torch.cuda.device_count():
        raise InputError(f"there is no {device} on this machine; use one that exists, or the cpu")
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=str(device))
    return Buffer(Region(tensor.data_ptr(), num_bytes, device), tensor)
