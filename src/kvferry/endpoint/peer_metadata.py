"""Metadata that an endpoint sends to each peer in the handshake, beside the protocol's fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.endpoint.control.unix import UnixListener

_Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class PeerMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of an endpoint's liveness port, staging memory and Unix listener.

    ``staging_region``: index of the memory region that holds the slots; None without staging.
    ``scratch_offset``, ``scratch_bytes``: the part of that region that any peer may write at any
    time, to measure its link.
    ``listener``: where a source accepts Unix-socket connections, with a secret.
    """

    liveness_port: tuple[Annotated[str, msgspec.Meta(max_length=64)], _Port]
    staging_region: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None
    scratch_offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    scratch_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    listener: UnixListener | None = None

    def encode(self) -> bytes:
        """Return the bytes for the handshake."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> PeerMetadata | None:
        """Return the metadata; None if the bytes are invalid."""
        try:
            return msgspec.msgpack.decode(data, type=PeerMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
            return None
