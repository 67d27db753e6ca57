"""The transports of one endpoint, best first: one by name, several, or all that work here.

All of them register the same pools, and each link uses the one that suits it; the handshake
chooses. Under ``auto`` a transport that does not work is left out, and the reason is kept. A
transport that was requested by name must work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.protocol.messages import (
    MAX_METADATA,
    MAX_WHY,
    TransportLack,
    TransportOffer,
    TransportOffers,
)
from kvferry.regions import Region
from kvferry.transports.base import Transport

AUTO = "auto"
# The transports of ``auto``. Mapped memory costs one copy, NIXL a write, Mooncake over TCP several.
BEST_FIRST = ("shm", "cuda", "nixl", "mooncake")


def transport_names(setting: str) -> tuple[str, ...]:
    """Parse ``auto``, one name, or several separated by commas."""
    names = BEST_FIRST if setting == AUTO else tuple(word.strip() for word in setting.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise TransportError(
            f"{setting!r:.80} has no transport, or one twice; write auto, one name, or several as "
            f"in shm,nixl"
        )
    return names


class TransportSet:
    """Transports by name, best first, and in ``lacked`` why others were left out.

    ``lenient``: leave out a transport that does not work instead of raising.
    """

    def __init__(self, name: str, transports: Sequence[Transport], *, lenient: bool) -> None:
        self.name = name
        self.lacked: dict[str, str] = {}
        self._lenient = lenient
        self._by_name = {transport.name: transport for transport in transports}

    @staticmethod
    def of(transport: Transport) -> TransportSet:
        """Return a set of one transport that exists already."""
        return TransportSet(transport.name, [transport], lenient=False)

    @staticmethod
    def make(setting: str, make: Callable[[str], Transport]) -> TransportSet:
        """Make each transport of ``setting`` by calling ``make``. Raises ``TransportError``."""
        made = TransportSet(setting, [], lenient=setting == AUTO)
        for name in transport_names(setting):
            try:
                made._by_name[name] = make(name)
            except TransportError as error:
                made._leave_out(name, error)
        made._require_any()
        return made

    def __iter__(self) -> Iterator[Transport]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Transport:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names, best first."""
        return tuple(self._by_name)

    @property
    def stages(self) -> bool:
        """Whether any of them uses staging memory."""
        return any(not transport.maps_peer for transport in self)

    # ------------------------------------------------------------ memory

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that all of them can register.

        It comes from a transport that maps memory, if there is one; the others accept any memory.
        """
        for transport in [one for one in self if one.maps_peer]:
            try:
                return transport.allocate(num_bytes)
            except TransportError as error:
                self._leave_out(transport.name, error)
        self._require_any()
        return next(iter(self)).allocate(num_bytes)

    def adopt(self, arrays: Sequence[Any]) -> None:
        """Make an engine's own arrays writable by peers, in place."""
        for transport in list(self):
            try:
                transport.adopt(arrays)
            except TransportError as error:
                self._leave_out(transport.name, error)
        self._require_any()

    def register(self, pools: Sequence[Region], staging: Region | None, *, writable: bool) -> None:
        """Register the pools with each, and the staging memory with those that stage."""
        for transport in list(self):
            extra = [staging] if staging and not transport.maps_peer else []
            try:
                transport.register([*pools, *extra], writable=writable)
            except TransportError as error:
                self._leave_out(transport.name, error)
        self._require_any()

    def offers(self, *, writable: bool) -> TransportOffers:
        """Return the handshake's list of transports, with metadata only if peers may write."""
        held = []
        for transport in list(self):
            payload = transport.metadata() if writable else b""
            if len(payload) <= MAX_METADATA:
                held.append(TransportOffer(transport.name, transport.realm, payload))
                continue
            text = f"its metadata has {len(payload)} bytes; allocate the pools in fewer pieces"
            self._leave_out(transport.name, TransportError(text))
        self._require_any()
        lacks = tuple(TransportLack(name, why[:MAX_WHY]) for name, why in self.lacked.items())
        return TransportOffers(tuple(held), lacks)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Close every transport."""
        for transport in self:
            transport.close()

    def _leave_out(self, name: str, error: TransportError) -> None:
        transport = self._by_name.pop(name, None)
        if transport is not None:
            transport.close()
        if not self._lenient:
            self.close()
            raise error
        self.lacked[name] = str(error)

    def _require_any(self) -> None:
        if not self._by_name:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.lacked.items())
            raise TransportError(f"no transport works here: {reasons}")
