"""The transports of one endpoint: which are made, which register memory, which are left out."""

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
from kvferry.transports.transport_set import BEST_FIRST, TransportSet, transport_names

POOL, SLOTS = Region(4096, 64), Region(8192, 32)


class RecordingTransport(Transport):
    """A transport that records its calls and fails the one that a test names."""

    name: ClassVar[str] = "recorder"

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


class MappingTransport(RecordingTransport):
    """One that maps peers' memory."""

    name: ClassVar[str] = "mapper"
    maps_peer: ClassVar[bool] = True


def auto(*made: Transport) -> TransportSet:
    return TransportSet("auto", made, lenient=True)


@pytest.mark.parametrize(
    ("name", "names"),
    [("auto", BEST_FIRST), ("nixl", ("nixl",)), ("shm, nixl", ("shm", "nixl"))],
)
def test_a_setting_names_transports_best_first(name: str, names: tuple[str, ...]) -> None:
    assert transport_names(name) == names


@pytest.mark.parametrize("name", ["", "shm,,nixl", "shm,shm", ","])
def test_a_malformed_setting_is_refused(name: str) -> None:
    with pytest.raises(TransportError, match="write auto, one name, or several as in shm,nixl"):
        transport_names(name)


def failing_to_make(error: str) -> Callable[[str], Transport]:
    def make(name: str) -> Transport:
        if name in ("shm", "nixl"):
            return RecordingTransport()
        raise TransportError(f"{error} {name}")

    return make


def test_a_missing_transport_is_left_out_unless_requested_by_name() -> None:
    made = TransportSet.make("auto", failing_to_make("install"))
    assert made.lacked == {"cuda": "install cuda", "mooncake": "install mooncake"}
    assert (made.name, made.names) == ("auto", ("shm", "nixl"))
    with pytest.raises(TransportError, match=r"^install mooncake$"):
        TransportSet.make("shm,mooncake", failing_to_make("install"))


def test_no_usable_transport_is_an_error_with_every_reason() -> None:
    recorder = RecordingTransport("register")
    with pytest.raises(TransportError, match="no transport works here: recorder: not that m"):
        auto(recorder).register([POOL], None, writable=True)
    assert recorder.is_closed


def test_pools_are_allocated_by_a_transport_that_maps_them() -> None:
    transports = auto(RecordingTransport(), MappingTransport())
    assert bytes(transports.allocate(3)) == b"mmm"
    lacking = auto(RecordingTransport(), MappingTransport("allocate"))
    assert bytes(lacking.allocate(3)) == b"rrr"
    assert lacking.lacked == {"mapper": "there is no room"}
    with pytest.raises(TransportError, match=r"^there is no room$"):
        TransportSet.of(MappingTransport("allocate")).allocate(3)


def test_only_transports_that_stage_register_staging_memory() -> None:
    recorder, mapper = RecordingTransport(), MappingTransport()
    transports = auto(mapper, recorder)
    transports.register([POOL], SLOTS, writable=True)
    assert (mapper.regions, recorder.regions) == ((POOL,), (POOL, SLOTS))
    assert transports.stages
    assert not auto(mapper).stages


def test_a_transport_that_cannot_register_is_closed_and_left_out() -> None:
    recorder, mapper = RecordingTransport(), MappingTransport("register")
    transports = auto(mapper, recorder)
    transports.register([POOL], None, writable=True)
    assert (transports.names, mapper.is_closed, recorder.is_closed) == (("recorder",), True, False)
    offers = transports.offers(writable=True)
    assert [(offer.name, offer.realm, offer.payload) for offer in offers.held] == [
        ("recorder", "recorder", b"here")
    ]
    assert [(lack.name, lack.why) for lack in offers.lacked] == [("mapper", "not that memory")]
    transports.close()
    assert recorder.is_closed


def test_a_source_offers_no_metadata() -> None:
    (offer,) = auto(RecordingTransport()).offers(writable=False).held
    assert offer.payload == b""


def test_metadata_too_large_for_a_frame_is_not_offered() -> None:
    transports = auto(RecordingTransport(), MappingTransport(payload=bytes(MAX_METADATA + 1)))
    assert [offer.name for offer in transports.offers(writable=True).held] == ["recorder"]
    transports.lacked["mapper"] = "x" * 1000
    assert len(transports.offers(writable=True).lacked[0].why) == MAX_WHY


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TransportError, match="none of shm, cuda, nixl, mooncake has an option 'x'"):
        make_transports("auto", options={"x": "1"})
    with pytest.raises(TransportError, match=r"has no option|NIXL"):
        make_transports("nixl", options={"x": "1"})


def test_auto_opens_no_public_port_on_loopback() -> None:
    why = make_transports("auto", "127.0.0.1").lacked["mooncake"]
    assert "Mooncake" in why or "listens on every address" in why


def test_ready_transports() -> None:
    assert "shm" in [one.name for one in ready_transports("auto")]
    assert [one.name for one in ready_transports("shm")] == ["shm"]
    with pytest.raises(TransportError, match="there is no transport 'x'"):
        ready_transports("shm,x")
