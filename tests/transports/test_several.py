"""Several transports of one endpoint: which are made, which take the memory, who is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.endpoint.setup import make_transports
from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.memory.copy.cpu import copy_binding
from kvferry.plan.bind import Binding
from kvferry.protocol.messages import MAX_METADATA, MAX_WHY
from kvferry.regions import Region
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.registry import ready_transports
from kvferry.transports.transport_set import BEST_FIRST, TransportSet, asked_for

POOL, SLOTS = Region(4096, 64), Region(8192, 32)


class Paper(Transport):
    """Writes down what it is given, and refuses what a test says."""

    name: ClassVar[str] = "paper"

    def __init__(self, refuses: str = "", payload: bytes = b"here") -> None:
        super().__init__(TransportSetup(agent="a", copy=copy_binding))
        self.refuses = refuses
        self.payload = payload
        self.is_closed = False

    @classmethod
    def missing(cls) -> str | None:
        return None

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        if self.refuses == "allocate":
            raise TransportError("there is no room")
        return np.full(num_bytes, ord(self.name[0]), dtype=np.uint8)

    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        if self.refuses == "register":
            raise TransportError("not that memory")
        self.regions = tuple(regions)

    def metadata(self) -> bytes:
        return self.payload

    def connect(self, metadata: bytes) -> RemoteMemory:
        return RemoteMemory()

    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None: ...

    def poll(self) -> list[WriteEnded]:
        return []

    def disconnect(self, remote: RemoteMemory) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Glass(Paper):
    """Maps memory."""

    name: ClassVar[str] = "glass"
    maps_peer: ClassVar[bool] = True


def auto(*transports: Transport) -> TransportSet:
    return TransportSet("auto", transports, lenient=True)


@pytest.mark.parametrize(
    ("name", "names"),
    [("auto", BEST_FIRST), ("nixl", ("nixl",)), ("shm, nixl", ("shm", "nixl"))],
)
def test_what_a_name_means(name: str, names: tuple[str, ...]) -> None:
    assert asked_for(name) == names


@pytest.mark.parametrize("name", ["", "shm,,nixl", "shm,shm", ","])
def test_what_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(TransportError, match="write auto, one name, or several as in shm,nixl"):
        asked_for(name)


def failing_to_make(error: str) -> Callable[[str], Transport]:
    def make(name: str) -> Transport:
        if name in ("shm", "nixl"):
            return Paper()
        raise TransportError(f"{error} {name}")

    return make


def test_what_is_not_installed_is_left_out_with_its_reason_unless_it_was_named() -> None:
    made = TransportSet.make("auto", failing_to_make("install"))
    assert made.lacked == {"cuda": "install cuda", "mooncake": "install mooncake"}
    assert (made.name, made.names) == ("auto", ("shm", "nixl"))
    with pytest.raises(TransportError, match=r"^install mooncake$"):
        TransportSet.make("shm,mooncake", failing_to_make("install"))


def test_nothing_at_all_is_an_error_with_every_reason() -> None:
    paper = Paper("register")
    with pytest.raises(TransportError, match="no transport can be used here: paper: not that mem"):
        auto(paper).register([POOL], None, writable=True)
    assert paper.is_closed


def test_pools_are_made_for_whoever_maps_them() -> None:
    several = auto(Paper(), Glass())
    assert bytes(several.allocate(3)) == b"ggg"
    lacking = auto(Paper(), Glass("allocate"))
    assert bytes(lacking.allocate(3)) == b"ppp"
    assert lacking.lacked == {"glass": "there is no room"}
    with pytest.raises(TransportError, match=r"^there is no room$"):
        TransportSet.of(Glass("allocate")).allocate(3)


def test_staging_memory_is_for_those_that_stage() -> None:
    paper, glass = Paper(), Glass()
    several = auto(glass, paper)
    several.register([POOL], SLOTS, writable=True)
    assert (glass.regions, paper.regions) == ((POOL,), (POOL, SLOTS))
    assert several.stages
    assert not auto(glass).stages


def test_whoever_can_not_take_the_memory_is_left_out_and_closed() -> None:
    paper, glass = Paper(), Glass("register")
    several = auto(glass, paper)
    several.register([POOL], None, writable=True)
    assert (several.names, glass.is_closed, paper.is_closed) == (("paper",), True, False)
    offers = several.offers(writable=True)
    assert [(offer.name, offer.realm, offer.payload) for offer in offers.held] == [
        ("paper", "paper", b"here")
    ]
    assert [(lack.name, lack.why) for lack in offers.lacked] == [("glass", "not that memory")]
    several.close()
    assert paper.is_closed


def test_a_source_does_not_tell_how_to_write_into_it() -> None:
    (offer,) = auto(Paper()).offers(writable=False).held
    assert offer.payload == b""


def test_what_no_frame_could_carry_is_not_offered() -> None:
    several = auto(Paper(), Glass(payload=bytes(MAX_METADATA + 1)))
    assert [offer.name for offer in several.offers(writable=True).held] == ["paper"]
    several.lacked["glass"] = "x" * 1000
    assert len(several.offers(writable=True).lacked[0].why) == MAX_WHY


def test_options_go_to_whoever_knows_them() -> None:
    with pytest.raises(TransportError, match="none of shm, cuda, nixl, mooncake has an option 'x'"):
        make_transports("auto", options={"x": "1"})
    with pytest.raises(TransportError, match=r"has no option|NIXL"):
        make_transports("nixl", options={"x": "1"})


def test_nobody_gets_an_open_port_unasked() -> None:
    why = make_transports("auto", "127.0.0.1").lacked["mooncake"]
    assert "Mooncake" in why or "listens on every address" in why


def test_what_is_ready() -> None:
    assert "shm" in [one.name for one in ready_transports("auto")]
    assert [one.name for one in ready_transports("shm")] == ["shm"]
    with pytest.raises(TransportError, match="there is no transport 'x'"):
        ready_transports("shm,x")
