"""The values that a discovery service stores and returns, and its error. All fields are bounded."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import InputError, KvferryError
from kvferry.ids import MAX_ID, MAX_NAME, Peer
from kvferry.layout.layout import MAX_RANKS, Layout

MAX_METADATA = 32

# Names appear in URLs and logs.
Name = Annotated[
    str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+/-]*\Z")
]
Incarnation = Annotated[int, Meta(ge=0, le=MAX_ID)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=4096)]],
    Meta(max_length=MAX_METADATA),
]


class DiscoveryFault(StrEnum):
    """Why a discovery call failed. The values are the error codes of the HTTP service.

    OTHER_LIFE: the request was signed for another start of the service than the running one.
    """

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
    """A discovery call failed: ``fault`` says why, the message what to do."""

    def __init__(self, fault: DiscoveryFault, message: str) -> None:
        self.fault = fault
        super().__init__(message)


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of one incarnation of one rank.

    ``control`` is the address of its control channel. ``metadata`` is for peers; the discovery
    service does not interpret it.
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
                f"{self.peer} is outside its layout, which has the ranks "
                f"0..{self.layout.num_ranks - 1}; correct the rank or the layout"
            )

    @property
    def peer(self) -> Peer:
        """Instance and rank."""
        return Peer(self.instance, self.rank)

    def agrees_with(self, other: RankRecord) -> bool:
        """Return whether both can be ranks of one instance."""
        return (
            self.transport == other.transport
            and self.fingerprint == other.fingerprint
            # Records of one instance usually share one layout object.
            and (self.layout is other.layout or self.layout == other.layout)
        )


class RankView(msgspec.Struct, frozen=True):
    """One rank in a view. ``incarnation`` is None if the service does not know it."""

    rank: int
    incarnation: int | None
    control: str
    metadata: dict[str, str] = {}


class InstanceView(msgspec.Struct, frozen=True):
    """A complete instance: every rank of one layout.

    ``version`` identifies this state of the instance and has no other meaning. ``fingerprint`` is
    None and ``transport`` empty if the service does not know them; the handshake does.
    """

    name: str
    version: str
    fingerprint: str | None
    layout: Layout
    transport: str
    ranks: tuple[RankView, ...]

    def __post_init__(self) -> None:
        if [view.rank for view in self.ranks] != list(range(self.layout.num_ranks)):
            raise InputError(
                f"instance {self.name!r:.100} does not have every rank of its layout once; "
                f"list them in their order"
            )

    def same_as(self, other: InstanceView | None) -> bool:
        """Return whether at most the version differs."""
        return other is not None and msgspec.structs.replace(other, version=self.version) == self

    def __repr__(self) -> str:
        return f"<InstanceView {self.name} {self.layout} version {self.version}>"


class Summary(msgspec.Struct, frozen=True):
    """One line of the list of instances.

    ``registered`` are the ranks that have registered, ``note`` says what the instance lacks.
    """

    name: str
    complete: bool
    version: str
    num_ranks: int
    registered: tuple[int, ...]
    transport: str
    fingerprint: str
    layout: str
    note: str


class Summaries(msgspec.Struct, frozen=True):
    """The list of instances. ``version`` is empty if the service does not number its lists."""

    instances: tuple[Summary, ...]
    version: str = ""


class InstanceName(msgspec.Struct, frozen=True, array_like=True):
    """An instance's name as ``msgspec`` checks it: of a struct, it analyses the type only once."""

    name: Name


def demand_name(name: str) -> None:
    """Raise ``InputError`` unless ``name`` is valid for an instance."""
    try:
        msgspec.convert((name,), InstanceName)
    except msgspec.ValidationError:
        raise InputError(
            f"{name!r:.300} is not a valid instance name; use 1 to {MAX_NAME} letters, digits and "
            f"any of ._:@+/-, beginning with a letter or digit"
        ) from None
