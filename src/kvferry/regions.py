"""Memory as transports and copies see it: an address, a length, and the device it is on."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import InputError

# A page of host memory: copies store whole lines, transports pin whole pages.
PAGE_BYTES = 4096


class Device(NamedTuple):
    """Where memory is: the host, or one GPU."""

    kind: str = "cpu"
    number: int = 0

    @staticmethod
    def parse(text: str) -> Device:
        """``cpu``, ``cuda`` or ``cuda:3``."""
        kind, _, number = text.partition(":")
        if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
            raise InputError(f"a device is cpu, cuda or cuda:N, not {text!r}")
        return Device(kind, int(number or 0))

    @property
    def is_host(self) -> bool:
        """Whether the CPU can touch it."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return self.kind if self.is_host else f"{self.kind}:{self.number}"


HOST = Device()


class Region(NamedTuple):
    """A contiguous piece of memory. Whoever made it keeps it alive."""

    address: int
    num_bytes: int
    device: Device = HOST

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.address + self.num_bytes
