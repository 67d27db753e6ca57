"""Memory that the suite's processes register, on the host or on a GPU, with margins around it."""

from __future__ import annotations

from typing import Any, Protocol

from kvferry.regions import Device, Region
from kvferry.testing.transports.bindings import Bytes


class RegionMemory(Protocol):
    """One region and its margins."""

    region: Region

    def write(self, values: Bytes) -> None:
        """Give the region these bytes."""

    def read(self) -> bytes:
        """All of it, margins included."""

    def peek(self, offset: int, length: int) -> bytes:
        """A few bytes of the region."""


class HostMemory:
    """An array."""

    def __init__(self, whole: Bytes, margin: int) -> None:
        self._whole = whole
        self._inner = whole[margin : len(whole) - margin]
        self.region = Region(self._inner.ctypes.data, self._inner.nbytes)

    def write(self, values: Bytes) -> None:
        """Give the region these bytes."""
        self._inner[:] = values

    def read(self) -> bytes:
        """All of it, margins included."""
        return self._whole.tobytes()

    def peek(self, offset: int, length: int) -> bytes:
        """A few bytes of the region."""
        return self._inner[offset : offset + length].tobytes()


class GpuMemory:
    """A tensor."""

    def __init__(self, device: Device, num_bytes: int, margin: int) -> None:
        import torch  # noqa: PLC0415 - only where there is a GPU

        self._torch: Any = torch
        whole = num_bytes + 2 * margin
        self._whole = torch.zeros(whole, dtype=torch.uint8, device=str(device))
        self._inner = self._whole[margin : margin + num_bytes]
        torch.cuda.synchronize()
        self.region = Region(self._inner.data_ptr(), num_bytes, device)

    def write(self, values: Bytes) -> None:
        """Give the region these bytes."""
        self._inner.copy_(self._torch.from_numpy(values))
        self._torch.cuda.synchronize()

    def read(self) -> bytes:
        """All of it, margins included."""
        return bytes(self._whole.cpu().numpy())

    def peek(self, offset: int, length: int) -> bytes:
        """A few bytes of the region."""
        return bytes(self._inner[offset : offset + length].cpu().numpy())
