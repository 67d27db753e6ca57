"""RDMA devices: ports, links, and whether this user may open them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.cli.doctor.checks.check import Asked, Check, lacking, ok
from kvferry.cli.doctor.checks.machine import read

AREA = "rdma"
CLASS = "sys/class/infiniband"
LIBRARY = "libibverbs.so.1"


class Port(NamedTuple):
    """One port of one device, as the kernel tells of it."""

    device: str
    number: str
    state: str
    rate: str
    layer: str

    @property
    def is_active(self) -> bool:
        """Whether its link is up."""
        return self.state.endswith("ACTIVE")

    def __str__(self) -> str:
        state = self.state.rpartition(": ")[2]
        return f"{self.device} port {self.number}: {state}, {self.rate}, {self.layer}"


def ports(root: Path = Path("/")) -> list[Port]:
    """Every port of every device."""
    found = sorted((root / CLASS).glob("*/ports/*"))
    return [
        Port(
            port.parent.parent.name,
            port.name,
            *(read(port / name) or "unknown" for name in ("state", "rate", "link_layer")),
        )
        for port in found
    ]


def devices(found: list[Port], root: Path = Path("/")) -> Iterator[Check]:
    """The ports, and whether they can be used."""
    if not found:
        yield ok(AREA, "devices", "none found; between hosts, transports use TCP")
        return
    for port in found:
        if port.is_active:
            yield ok(AREA, port.device, str(port))
        else:
            remedy = "check its cable, its switch and, for InfiniBand, the subnet manager"
            yield lacking(AREA, port.device, str(port), needed=False, remedy=remedy)
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not any(os.access(one, os.R_OK | os.W_OK) for one in verbs):
        yield lacking(
            AREA,
            "access",
            "this process may not open any of /dev/infiniband/uverbs*",
            needed=False,
            remedy="docker run --device /dev/infiniband, or join the group that owns them",
        )


def library(asked: Asked) -> Iterator[Check]:
    """Mooncake loads this library also where it uses TCP."""
    if sys.platform != "linux":
        yield ok(AREA, LIBRARY, "not on this system")
        return
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        yield lacking(
            AREA,
            LIBRARY,
            f"can't be loaded ({error})",
            needed=asked.needs("mooncake"),
            remedy="apt-get install libibverbs1, or dnf install libibverbs",
        )
    else:
        yield ok(AREA, LIBRARY, "can be loaded")
