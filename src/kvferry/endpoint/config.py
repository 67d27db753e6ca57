"""Configuration of an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import inf

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.errors import InputError
from kvferry.plan.choose import TransferMode
from kvferry.plan.cost import LinkCost


class ProofMode(StrEnum):
    """Which content a target compares with its sources before a room is done."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


# Parts of the rooms and of the cells of such a room that are compared. The proof of a small room
# takes more than the room itself, so it is all or nothing.
PROVEN = {
    ProofMode.OFF: (0.0, 1.0),
    ProofMode.SAMPLED: (1 / 256, 1.0),
    ProofMode.FULL: (1.0, 1.0),
}
# A trace event takes some 150 bytes, and a room of one chunk has some ten events at each rank.
MAX_TRACE_EVENTS = 1 << 22


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one endpoint. Raises ``InputError`` for a value that makes no sense.

    ``host``, ``port``: the numeric address that peers reach this endpoint at, and the port of a
    source's control channel. Port 0 takes any free port.
    ``staging_bytes``: budget for staging slots. None: 64 MiB, or 128 MiB on a GPU. The endpoint
    allocates 1 MiB more (4 MiB on a GPU) to measure links. 0 turns staging and measuring off.
    ``slot_bytes``: size of a slot. None chooses one that suits the pools' device.
    ``mode``: always use this transfer mode instead of the fastest one by the cost model.
    ``link_cost``: use this cost model and do not measure links.
    ``deadline_s``: seconds that a room may take, unless the call that opens it says otherwise.
    ``lease_s``: a source's registration in the discovery service expires after so many seconds
    without renewal.
    ``discovery_timeout_s``: seconds that a room waits for an instance that the discovery service
    reports as incomplete. None waits until the room's deadline.
    ``trace_events``: number of trace events kept in memory. 0 turns tracing and the status
    reports to the discovery service off.
    ``metrics``: whether to count anything, for Prometheus and for ``stats``.
    ``proof``: a target compares checksums of the content of all rooms (``full``), of one in 256
    (``sampled``), or of none (``off``). Sources follow their targets.
    ``protocol``: timers and limits of the protocol.
    ``options``: the transport's own options.
    """

    host: str = "127.0.0.1"
    port: int = 0
    staging_bytes: int | None = None
    slot_bytes: int | None = None
    mode: TransferMode | None = None
    link_cost: LinkCost | None = None
    deadline_s: float = 30.0
    lease_s: float = 10.0
    discovery_timeout_s: float | None = None
    trace_events: int = 4096
    metrics: bool = True
    proof: ProofMode = ProofMode.SAMPLED
    protocol: ProtocolConfig = ProtocolConfig()
    options: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"port must be from 0 to 65535, not {self.port}")
        slot_bytes, staging_bytes = self.slot_bytes, self.staging_bytes
        if (staging_bytes or 0) < 0 or (slot_bytes is not None and slot_bytes <= 0):
            raise InputError("staging_bytes must be 0 or more, and slot_bytes above 0")
        if not 0 <= self.trace_events <= MAX_TRACE_EVENTS:
            raise InputError(
                f"trace_events must be from 0 to {MAX_TRACE_EVENTS}, not {self.trace_events}"
            )
        if self.proof not in list(ProofMode):
            raise InputError(f"proof must be {', '.join(ProofMode)}, not {self.proof!r:.80}")
        for name in ("deadline_s", "lease_s", "discovery_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < inf:
                raise InputError(f"{name} must be above 0 and finite, not {seconds}")
