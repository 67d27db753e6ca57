"""Names of a prefill server's instances at its bootstrap address. Pure.

Each data-parallel replica of a prefill server is an instance, registered at the server's bootstrap
port. A decode server knows only the address in the request. It lists the instances there, and uses
the replica that the request names, or ``room % dp_size``. An instance of another engine can be
used if it is the only one at the address, because SGLang can name nothing but the address.

Servers may register in a discovery service that they share instead. The replicas of an address are
then those whose name has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry import InputError

_NAME = re.compile(r"sglang/(?P<address>.+)/dp(?P<rank>\d+)of(?P<size>\d+)")


@dataclass(frozen=True)
class Replica:
    """A data-parallel replica of a server: address, rank and number of replicas."""

    address: str
    rank: int
    size: int

    def __str__(self) -> str:
        return f"sglang/{self.address}/dp{self.rank}of{self.size}"

    @staticmethod
    def parse(name: str) -> Replica | None:
        """Return the replica with that name; None if it is not a name of SGLang's."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return Replica(found["address"], int(found["rank"]), int(found["size"]))


def replicas_at(address: str, names: Iterable[str]) -> list[str]:
    """Return the names of the replicas whose server is at a bootstrap address, in numbers.

    The other names of a discovery service that many servers share are left out.
    """
    found = ((name, Replica.parse(name)) for name in names)
    return [name for name, replica in found if replica is not None and replica.address == address]


@dataclass(frozen=True)
class PrefillInfo:
    """A prefill server's instances by DP rank, with the attributes that SGLang reads."""

    names: tuple[str, ...]
    follow_bootstrap_room: bool = True

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return len(self.names)


def instances_at(address: str, names: Iterable[str]) -> PrefillInfo:
    """Return the prefill server at an address; raise ``InputError`` if it is ambiguous."""
    found = sorted(names)
    replicas = {name: Replica.parse(name) for name in found}
    servers = {(each.address, each.size) for each in replicas.values() if each is not None}
    if not servers and len(found) == 1:
        return PrefillInfo((found[0],))
    if len(servers) != 1:
        raise InputError(
            f"{address} has {', '.join(found) or 'no instance'} registered; a bootstrap address "
            f"must have the replicas of one SGLang prefill server, or one other instance"
        )
    server, size = servers.pop()
    return PrefillInfo(tuple(str(Replica(server, rank, size)) for rank in range(size)))
