"""The constants of an endpoint's transports before any link is measured."""

from __future__ import annotations

import time
from functools import cache

from msgspec.structs import replace

from kvferry.endpoint.calibration import PIECE_BYTES, SCRATCH_BYTES, scattered
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.setup import EndpointSetup
from kvferry.memory.copy.cpu import copy_binding
from kvferry.memory.staging import allocate
from kvferry.plan.cost import LinkCost, default_link_cost
from kvferry.plan.places import Base
from kvferry.transports.base import Transport


def default_link_costs(config: EndpointConfig, setup: EndpointSetup) -> dict[str, LinkCost]:
    """Return each transport's constants: those of the configuration, or else the assumed ones."""

    def of(transport: Transport) -> LinkCost:
        if config.link_cost is not None:
            return replace(config.link_cost, maps_peer=transport.maps_peer)
        device = setup.memory.device
        return default_link_cost(
            transport.name,
            device,
            slot_bytes=setup.slots.pool.slot_bytes if setup.slots else None,
            copy_bytes_per_s=copy_speed() if device.is_host else None,
            maps_peer=transport.maps_peer,
        )

    return {transport.name: of(transport) for transport in setup.transports}


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
