"""What an endpoint tells every peer about itself beside the protocol: its metadata."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.liveness.port import Address
from kvferry.errors import TransportError

_Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class PeerMetadata(msgspec.Struct, frozen=True, array_like=True):
    """How to find out that an endpoint is gone, and where its staging memory is.

    ``staging_region`` is the number of the region with its slots, and
    ``scratch_offset`` where in it so many bytes are that anybody may write at any time, to measure.
    ``listener`` is where a source listens for targets of its own host; it has a secret.
    """

    liveness_port: tuple[Annotated[str, msgspec.Meta(max_length=64)], _Port]
    staging_region: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | None = None
    scratch_offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    scratch_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)] = 0
    listener: UnixListener | None = None

    def encode(self) -> bytes:
        """For the handshake."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> PeerMetadata:
        """Raises ``TransportError`` for what is no metadata."""
        try:
            return msgspec.msgpack.decode(data, type=PeerMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise TransportError(f"a peer's metadata can't be read: {error}") from None

    @staticmethod
    def read(data: bytes) -> PeerMetadata | None:
        """The same; None for what is no metadata."""
        try:
            return PeerMetadata.decode(data)
        except TransportError:
            return None

    @property
    def address(self) -> Address:
        """Of its liveness_port."""
        return self.liveness_port
