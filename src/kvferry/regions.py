"""Memory regions: an address, a length and the device the memory is on."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import InputError

# Page size of host memory. Transports pin whole pages.
PAGE_BYTES = 4096


class Device(NamedTuple):
    """A device that has memory: the host or one GPU."""

    kind: str = "cpu"
    number: int = 0

    @staticmethod
    def parse(text: str) -> Device:
        """Parse ``cpu``, ``cuda`` or ``cuda:N``."""
        kind, _, number = text.partition(":")
        if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
            raise InputError(f"a device is cpu, cuda or cuda:N, not {text!r}")
        return Device(kind, int(number or 0))

    @property
    def is_host(self) -> bool:
        """Whether the CPU can access this memory."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return self.kind if self.is_host else f"{self.kind}:{self.number}"


HOST = Device()


class Region(NamedTuple):
    """A contiguous piece of memory. Its owner must keep it alive while it is used."""

    address: int
    num_bytes: int
    device: Device = HOST

    @property
    def end(self) -> int:
        """Address of the first byte after the region."""
        return self.address + self.num_bytes
