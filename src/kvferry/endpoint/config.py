"""What an endpoint may be told: frozen, keyword-only, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.errors import InputError
from kvferry.plan.choose import TransferMode
from kvferry.plan.cost import DEFAULT_BUDGET_BYTES, LinkCost

# A step has some 150 bytes, and a room of one chunk some ten steps at each rank.
MAX_KEPT_STEPS = 1 << 22


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where an endpoint listens, how much it stages, and which mode it takes.

    ``staging_bytes`` is what is staged through, beside 1 MiB (4 on a GPU) to measure links; 0 is
    neither. It is cut into slots of ``slot_bytes``, or of what suits the pools' device.
    ``mode`` overrides the chooser and ``link_cost`` what it would measure.
    ``options`` are the transport's own. A room waits ``discovery_timeout_s`` for an instance that
    discovery
    says is not complete; None is until its deadline. ``trace_events`` is how many steps of its last
    rooms are kept; 0 is none, and then discovery gets no status reports from this endpoint.
    ``metrics`` says whether it counts anything, for Prometheus and for ``stats``.
    """

    host: str = "127.0.0.1"
    port: int = 0
    staging_bytes: int = DEFAULT_BUDGET_BYTES
    slot_bytes: int | None = None
    mode: TransferMode | None = None
    link_cost: LinkCost | None = None
    deadline_s: float = 30.0
    lease_s: float = 10.0
    discovery_timeout_s: float | None = None
    trace_events: int = 4096
    metrics: bool = True
    protocol: ProtocolConfig = ProtocolConfig()
    options: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"a port is a number from 0 to 65535, not {self.port}")
        if self.staging_bytes < 0 or (self.slot_bytes is not None and self.slot_bytes <= 0):
            raise InputError("staging_bytes is 0 or more, and slot_bytes above 0")
        if not 0 <= self.trace_events <= MAX_KEPT_STEPS:
            raise InputError(f"trace_events is from 0 to {MAX_KEPT_STEPS}, not {self.trace_events}")
        for name in ("deadline_s", "lease_s", "discovery_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < inf:
                raise InputError(f"{name} must be above 0 and finite, not {seconds}")
