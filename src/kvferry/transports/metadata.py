"""Parsing of the metadata that peers of a transport exchange, with its common field types."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import TransportError

MAX_REGIONS = 1 << 16
# An address, an offset or a number of bytes.
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]

T = TypeVar("T", bound=msgspec.Struct)


def decode_metadata(transport: str, metadata: bytes, kind: type[T]) -> T:
    """Parse a peer's metadata. Raises ``TransportError``."""
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError(
            f"cannot read the peer's {transport} metadata ({error}); run one version of kvferry"
        ) from error
