"""The transports of one endpoint, best first: one that was named, several, or all that work here.

Each takes the same pools, so that every link can have the one that suits it. Who makes them
is the runtime, and which of them carries a link is agreed on in the handshake. What can't be
had is left out with its reason where nobody asked for it by name, and is an error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

# The name for "whatever works here", and what is tried, best first: memory that is mapped costs
# one copy, NIXL a write, and Mooncake's TCP several times that.
AUTO = "auto"
BEST_FIRST = ("shm", "cuda", "nixl", "mooncake")


def asked_for(name: str) -> tuple[str, ...]:
    """The transports that a name means: ``auto``, one, or several with commas between them."""
    names = BEST_FIRST if name == AUTO else tuple(word.strip() for word in name.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise TransportError(
            f"{name!r:.80} names no transport, or one twice; write auto, one name, or several as "
            f"in shm,nixl"
        )
    return names


class TransportSet:
    """Transports by name, in their order, and why others are not among them.

    One that was asked for by its own name must work; under ``auto`` it is left out.
    """

    def __init__(self, name: str, transports: Sequence[Transport], *, lenient: bool) -> None:
        self.name = name
        self.lacked: dict[str, str] = {}
        self._lenient = lenient
        self._by_name = {transport.name: transport for transport in transports}

    @staticmethod
    def of(transport: Transport) -> TransportSet:
        """One that somebody has made."""
        return TransportSet(transport.name, [transport], lenient=False)

    @staticmethod
    def make(name: str, make: Callable[[str], Transport]) -> TransportSet:
        """Those that ``name`` means, each made by ``make``. Raises ``TransportError``."""
        made = TransportSet(name, [], lenient=name == AUTO)
        for each in asked_for(name):
            try:
                made._by_name[each] = make(each)
            except TransportError as error:
                made._do_without(each, error)
        made._demand_any()
        return made

    def __iter__(self) -> Iterator[Transport]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Transport:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Best first."""
        return tuple(self._by_name)

    @property
    def stages(self) -> bool:
        """Whether any of them may want staging memory."""
        return any(not transport.maps_peer for transport in self)

    # ------------------------------------------------------------ memory

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that all of them can take: what is to be mapped must be made for it."""
        for transport in [one for one in self if one.maps_peer]:
            try:
                return transport.allocate(num_bytes)
            except TransportError as error:
                self._do_without(transport.name, error)
        self._demand_any()
        return next(iter(self)).allocate(num_bytes)

    def adopt(self, arrays: Sequence[Any]) -> None:
        """Have an engine's own arrays made fit for peers to write, in place."""
        for transport in list(self):
            try:
                transport.adopt(arrays)
            except TransportError as error:
                self._do_without(transport.name, error)
        self._demand_any()

    def register(self, pools: Sequence[Region], staging: Region | None, *, writable: bool) -> None:
        """Let each take the pools, and staging memory if it stages."""
        for transport in list(self):
            extra = [staging] if staging and not transport.maps_peer else []
            try:
                transport.register([*pools, *extra], writable=writable)
            except TransportError as error:
                self._do_without(transport.name, error)
        self._demand_any()

    def offers(self, *, writable: bool) -> TransportOffers:
        """What peers are told; how to write here only if they may."""
        held = []
        for transport in list(self):
            payload = transport.metadata() if writable else b""
            if len(payload) <= MAX_METADATA:
                held.append(TransportOffer(transport.name, transport.realm, payload))
                continue
            text = f"its metadata has {len(payload)} bytes; allocate the pools in fewer pieces"
            self._do_without(transport.name, TransportError(text))
        self._demand_any()
        return TransportOffers(tuple(held), _lacks(self.lacked))

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Give everything back."""
        for transport in self:
            transport.close()

    def _do_without(self, name: str, error: TransportError) -> None:
        """Leave a transport out, unless it was asked for by name."""
        transport = self._by_name.pop(name, None)
        if transport is not None:
            transport.close()
        if not self._lenient:
            self.close()
            raise error
        self.lacked[name] = str(error)

    def _demand_any(self) -> None:
        if not self._by_name:
            whys = "; ".join(f"{name}: {why}" for name, why in self.lacked.items())
            raise TransportError(f"no transport can be used here: {whys}")


def _lacks(lacked: Mapping[str, str]) -> tuple[TransportLack, ...]:
    return tuple(TransportLack(name, why[:MAX_WHY]) for name, why in lacked.items())
