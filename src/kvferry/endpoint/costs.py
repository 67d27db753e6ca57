"""Link costs that an endpoint assumes before it has measured a link."""

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
    """Return the cost of each transport: the configured one, or else the default."""
    device, slots = setup.memory.device, setup.slots

    def cost_of(transport: Transport) -> LinkCost:
        if config.link_cost is not None:
            return replace(config.link_cost, maps_peer=transport.maps_peer)
        return default_link_cost(
            transport.name,
            device,
            slot_bytes=slots.pool.slot_bytes if slots else None,
            copy_bytes_per_s=copy_speed() if device.is_host else None,
            maps_peer=transport.maps_peer,
        )

    return {transport.name: cost_of(transport) for transport in setup.transports}


@cache
def copy_speed() -> float:
    """Return the CPU's bytes per second when gathering small pieces, measured once a process."""
    source, target = allocate(2 * SCRATCH_BYTES), allocate(2 * SCRATCH_BYTES)
    pieces = scattered(Base(0, 0, 0), Base(0, 0, 0), SCRATCH_BYTES // PIECE_BYTES)
    addresses = (source.region.address,), (target.region.address,)
    copy_binding(pieces, *addresses)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        copy_binding(pieces, *addresses)
        seconds.append(time.perf_counter() - begin)
    return SCRATCH_BYTES / min(seconds)
