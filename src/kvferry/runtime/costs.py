"""Costs of a transport and of copies before they are measured, for the chooser of paths."""

from __future__ import annotations

import time
from functools import cache

from msgspec.structs import replace

from kvferry.copy.cpu import copy_binding
from kvferry.plan.choose import PRESETS, Constants
from kvferry.plan.places import Base
from kvferry.regions import Device
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.mover.calibration import PIECE_BYTES, SCRATCH_BYTES, scattered
from kvferry.runtime.setup import EndpointSetup
from kvferry.staging import allocate
from kvferry.staging.pool import DEFAULT_SLOT_BYTES

# What a slot costs beside its bytes: a gather, a write, a note and a scatter through two
# processes' queues. Seen on 2 shared cores; a transport's own constants are measured.
SLOT_S = 250e-6


def preset_for(transport: str, device: Device) -> str:
    """Whose figures are used before an endpoint has measured its own."""
    where = "host" if device.is_host else "gpu"
    names = (transport, f"{transport}-{where}", f"nixl-{where}")
    return next(name for name in names if name in PRESETS)


def first_constants(config: EndpointConfig, setup: EndpointSetup) -> Constants:
    """What a transport is taken to cost until it was measured."""
    if config.constants is not None:
        return config.constants
    transport, device = setup.transport, setup.memory.device
    preset = PRESETS[preset_for(transport.name, device)]
    return replace(
        preset,
        copy_bytes_per_s=copy_speed() if device.is_host else preset.copy_bytes_per_s,
        slot_bytes=setup.slots.pool.slot_bytes if setup.slots else DEFAULT_SLOT_BYTES,
        slot_s=SLOT_S,
        maps_peer=transport.maps_peer,
    )


@cache
def copy_speed() -> float:
    """Bytes a second that the CPU gathers in small pieces, measured once for a process."""
    from_, into = allocate(2 * SCRATCH_BYTES), allocate(2 * SCRATCH_BYTES)
    pieces = scattered(Base(0, 0, 0), Base(0, 0, 0), SCRATCH_BYTES // PIECE_BYTES)
    addresses = (from_.region.address,), (into.region.address,)
    copy_binding(pieces, *addresses)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        copy_binding(pieces, *addresses)
        seconds.append(time.perf_counter() - begin)
    return SCRATCH_BYTES / min(seconds)
