"""Timeouts and limits of the protocol. Frozen, keyword-only, validated when created."""

from __future__ import annotations

from math import inf

import msgspec

from kvferry.errors import InputError


class LivenessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts for detecting a dead peer or a stalled local thread, in seconds.

    ``heartbeat_s``: maximum interval between two frames on an established link. Keep it well
    below the other side's ``silence_s``.
    ``silence_s``: a peer that sends nothing for this long is lost.
    ``unresponsive_s``: the same limit for a peer whose process is known to run but cannot send,
    for example because it is starved of CPU or of the GIL.
    ``idle_s``: a target closes a link that no room has used for this long; the next room opens one.
    ``handshake_s``: a peer that leaves a Hello or a Welcome unanswered for this long is lost.
    ``stalled_s``: an endpoint thread that makes no progress for this long is reported.
    """

    heartbeat_s: float = 1.0
    silence_s: float = 8.0
    unresponsive_s: float = 60.0
    idle_s: float = 300.0
    handshake_s: float = 15.0
    stalled_s: float = 5.0

    def __post_init__(self) -> None:
        for name in LivenessConfig.__struct_fields__:
            seconds = getattr(self, name)
            if not 0 < seconds < inf:
                raise InputError(f"{name} must be above 0 and finite, not {seconds}")
        if self.silence_s < 2 * self.heartbeat_s:
            raise InputError(
                f"silence_s={self.silence_s} must be at least twice heartbeat_s="
                f"{self.heartbeat_s}; otherwise one lost heartbeat looks like a dead peer"
            )


_ZERO_ALLOWED = ("early_gather_slots", "proof_rooms", "proof_share")


class ProtocolConfig(LivenessConfig, frozen=True, kw_only=True):
    """Timeouts and limits of a protocol machine. The two sides may use different values.

    ``max_rooms``, ``max_tokens``: a target refuses a room beyond these with ``too-many-rooms`` and
    tells its sources at once. ``max_tokens`` counts the tokens to receive in all open rooms; None
    is no limit. A source has ``max_rooms`` only.
    ``early_gather_slots``: how many local slots an outbound transfer may fill before it has
    credits for them. With None the endpoint chooses by memory type; a machine uses 0.
    ``proof_rooms``: part of its rooms whose content a target compares with its sources.
    ``proof_share``: part of the cells of such a room that is compared.
    """

    resend_s: float = 0.5
    status_poll_s: float = 2.0
    unclaimed_offer_ttl_s: float = 120.0
    credit_patience_s: float = 1.0
    max_peers: int = 4096
    max_rooms: int = 65536
    max_tokens: int | None = None
    max_early_rooms: int = 4096
    max_asked_rooms: int = 256
    max_quarantined_rooms: int = 256
    max_inflight: int = 16
    credits_per_source: int = 4
    local_slots: int = 3
    local_slot_bytes: int = 4 << 20
    early_gather_slots: int | None = None
    proof_rooms: float = 0.0
    proof_share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.__struct_fields__:
            number = getattr(self, name)
            if name not in _ZERO_ALLOWED and number is not None and number <= 0:
                raise InputError(f"{name} must be above 0, not {number}")
        for name in ("proof_rooms", "proof_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if self.early_gather_slots is not None and self.early_gather_slots < 0:
            raise InputError(
                f"early_gather_slots must be 0 or above, not {self.early_gather_slots}"
            )
