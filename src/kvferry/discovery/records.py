"""Records: what is said at discovery. Frozen values, every field bounded, and one error.

Nothing here acts. ``service`` keeps records, ``http`` and ``client`` carry them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import InputError, KvferryError
from kvferry.ids import MAX_ID, MAX_NAME, Peer
from kvferry.layout.layout import MAX_RANKS, Layout

MAX_METADATA = 32
MIN_LEASE_S, MAX_LEASE_S = 0.2, 300.0

# Names stand in addresses and logs, so they begin with a letter or a digit and are plain.
Name = Annotated[
    str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+/-]*\Z")
]
Incarnation = Annotated[int, Meta(ge=0, le=MAX_ID)]
LeaseSeconds = Annotated[float, Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=4096)]],
    Meta(max_length=MAX_METADATA),
]


class DiscoveryFault(StrEnum):
    """Why the service, or the way to it, said no."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    UNSIGNED = "unsigned"
    REPLAYED = "replayed"
    OTHER_LIFE = "other-life"
    NOT_FOUND = "not-found"
    METHOD = "method"
    INCOMPLETE = "incomplete"
    NO_LEASE = "no-lease"
    REPLACED = "replaced"
    FULL = "full"
    SETTLING = "settling"
    STOPPING = "stopping"
    SLOW = "slow"
    INTERNAL = "internal"
    UNREACHABLE = "unreachable"


class DiscoveryError(KvferryError):
    """Discovery did not do what was asked; ``fault`` says why, the sentence what to do."""

    def __init__(self, fault: DiscoveryFault, message: str) -> None:
        self.fault = fault
        super().__init__(message)


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one instance, in one of its lives.

    ``control`` is the address of its control channel. ``metadata`` is whatever
    else its peers need; the discovery service does not look at it.
    """

    instance: Name
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    incarnation: Incarnation
    fingerprint: Annotated[str, Meta(max_length=4096)]
    layout: Layout
    transport: Annotated[str, Meta(max_length=64)]
    control: Annotated[str, Meta(max_length=512)]
    metadata: Metadata = {}

    def __post_init__(self) -> None:
        if self.rank >= self.layout.num_ranks:
            raise InputError(
                f"{self.peer} is outside its own layout, which has ranks "
                f"0..{self.layout.num_ranks - 1}"
            )

    @property
    def peer(self) -> Peer:
        """The name by which the protocol knows it."""
        return Peer(self.instance, self.rank)

    def agrees_with(self, other: RankRecord) -> bool:
        """Whether both can be ranks of one instance."""
        return (
            self.transport == other.transport
            and self.fingerprint == other.fingerprint
            # Records of one instance mostly share one layout object.
            and (self.layout is other.layout or self.layout == other.layout)
        )


class RankView(msgspec.Struct, frozen=True):
    """One rank as discovery shows it. ``incarnation`` is None where only the rank can tell."""

    rank: int
    incarnation: int | None
    control: str
    metadata: dict[str, str] = {}


class InstanceView(msgspec.Struct, frozen=True):
    """A complete instance: every rank of one layout, none from another.

    ``version`` names this state of it and means nothing else. ``fingerprint`` is None and
    ``transport`` empty if only its ranks can tell, at the handshake.
    """

    name: str
    version: str
    fingerprint: str | None
    layout: Layout
    transport: str
    ranks: tuple[RankView, ...]

    def __post_init__(self) -> None:
        if [view.rank for view in self.ranks] != list(range(self.layout.num_ranks)):
            raise InputError(f"instance {self.name!r:.100} has not every rank of its layout once")

    def same_as(self, other: InstanceView | None) -> bool:
        """Whether nothing but the version differs."""
        return other is not None and msgspec.structs.replace(other, version=self.version) == self

    def __repr__(self) -> str:
        return f"<InstanceView {self.name} {self.layout} version {self.version}>"


class Registration(msgspec.Struct, frozen=True):
    """The body of a registration."""

    record: RankRecord
    lease_s: LeaseSeconds


class Renewal(msgspec.Struct, frozen=True):
    """The body of a renewal."""

    incarnation: Incarnation
    lease_s: LeaseSeconds


class Summary(msgspec.Struct, frozen=True):
    """One line of the list of instances, for people and routers."""

    name: str
    complete: bool
    version: str
    num_ranks: int
    registered: int
    transport: str
    fingerprint: str
    layout: str
    note: str


class Summaries(msgspec.Struct, frozen=True):
    """The list of instances."""

    instances: tuple[Summary, ...]


class DiscoveryErrorBody(msgspec.Struct, frozen=True):
    """What is inside an error."""

    code: DiscoveryFault
    message: str


class DiscoveryErrorDocument(msgspec.Struct, frozen=True):
    """Every error of the service."""

    error: DiscoveryErrorBody


def demand_name(name: str) -> None:
    """Raises ``InputError`` unless an instance may be called that."""
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise InputError(
            f"an instance's name has 1 to {MAX_NAME} letters, digits and any of ._:@+/- behind "
            f"the first; {name!r:.300} has not"
        ) from None
