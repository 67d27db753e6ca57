"""Request bodies, error documents and paths of the discovery service's HTTP interface."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import Meta

from kvferry.discovery.records import DiscoveryFault, Incarnation, RankRecord
from kvferry.ids import Peer

MIN_LEASE_S, MAX_LEASE_S = 0.2, 300.0

LeaseSeconds = Annotated[float, Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]


class Registration(msgspec.Struct, frozen=True):
    """Body of a registration."""

    record: RankRecord
    lease_s: LeaseSeconds


class Renewal(msgspec.Struct, frozen=True):
    """Body of a renewal."""

    incarnation: Incarnation
    lease_s: LeaseSeconds


class LongerLease(msgspec.Struct, frozen=True):
    """Answer to a renewal whose lease is longer than requested."""

    lease_s: float


class DiscoveryErrorBody(msgspec.Struct, frozen=True):
    """Code and message of an error."""

    code: DiscoveryFault
    message: str


class DiscoveryErrorDocument(msgspec.Struct, frozen=True):
    """Body of every error response."""

    error: DiscoveryErrorBody


def rank_path(peer: Peer) -> str:
    """Return the path of a rank."""
    return f"/v1/instances/{quote(peer.instance, safe='')}/ranks/{peer.rank}"
