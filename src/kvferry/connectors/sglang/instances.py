"""Instances of a prefill server, as its bootstrap address shows them.

A prefill server is one instance for each data-parallel replica; all of them are registered at its
bootstrap port, which is a discovery service. A decode server knows only the address that a request
carries, asks there who is registered, and takes the replica that SGLang means: ``room % dp_size``,
or the one that the request names. An instance that is not SGLang's is taken where it is alone,
because an address is all that SGLang can say of it, and left out where there are SGLang's.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry import InputError

_NAME = re.compile(r"sglang/(?P<address>.+)/dp(?P<rank>\d+)of(?P<size>\d+)")


@dataclass(frozen=True)
class Replica:
    """One data-parallel replica of the prefill server at an address, and of how many."""

    address: str
    rank: int
    size: int

    def __str__(self) -> str:
        return f"sglang/{self.address}/dp{self.rank}of{self.size}"

    @staticmethod
    def parse(name: str) -> Replica | None:
        """The replica of that name; None if no SGLang server has such names."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return Replica(found["address"], int(found["rank"]), int(found["size"]))


@dataclass(frozen=True)
class PrefillInfo:
    """Which instances are behind an address, in SGLang's own words: ``names`` by DP rank."""

    names: tuple[str, ...]
    follow_bootstrap_room: bool = True

    @property
    def dp_size(self) -> int:
        """How many replicas."""
        return len(self.names)


def instances_at(address: str, names: Iterable[str]) -> PrefillInfo:
    """The instances of the prefill server at an address. Raises ``InputError`` if unclear."""
    found = sorted(names)
    replicas = {name: Replica.parse(name) for name in found}
    servers = {(each.address, each.size) for each in replicas.values() if each is not None}
    if not servers and len(found) == 1:
        return PrefillInfo((found[0],))
    if len(servers) != 1:
        raise InputError(
            f"{address} has {', '.join(found) or 'nobody'} registered; a bootstrap address must "
            f"have the replicas of one SGLang prefill server, or one other instance alone"
        )
    server, size = servers.pop()
    return PrefillInfo(tuple(str(Replica(server, rank, size)) for rank in range(size)))
