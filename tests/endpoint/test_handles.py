"""Handles and the arguments of an engine's calls: both endpoints in this process, over shm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from endpoint.fleets import HYBRID, QUICK, eventually, layout
from msgspec.structs import replace
from numpy.typing import NDArray

from kvferry.digest import digest_of
from kvferry.discovery.records import InstanceView, RankRecord, RankView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.setup import make_transport
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.errors import InputError, Misuse
from kvferry.ids import MAX_ID, Room
from kvferry.layout.spec import attention
from kvferry.memory.pools import Memory
from kvferry.protocol.messages import MAX_METADATA
from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome, Status

PAGE = 4
SPEC = attention(layers=1, kv_heads=2, head_dim=8)
LAYOUT = layout(SPEC, PAGE)
CONFIG = EndpointConfig(protocol=QUICK, deadline_s=20.0)
WAIT_S = 15.0


class Pair(NamedTuple):
    """A source and a target of one rank each, and the target's pages as ``[pages, bytes]``."""

    source: SourceEndpoint
    target: TargetEndpoint
    view: InstanceView
    pages: NDArray[np.uint8]


def view_of(record: RankRecord) -> InstanceView:
    rank = RankView(record.rank, record.incarnation, record.control)
    its = (record.fingerprint, record.layout, record.transport)
    return InstanceView(record.instance, "", *its, (rank,))


@pytest.fixture
def pair() -> Iterator[Pair]:
    transports = make_transport("shm"), make_transport("shm")
    memories = [Memory.allocate(LAYOUT, 0, 8, each.allocate) for each in transports]
    sent, got = (memory.owners for memory in memories)
    assert isinstance(sent, list)
    assert isinstance(got, list)
    for array in sent:
        array[:] = 7
    with (
        SourceEndpoint(
            LAYOUT, memories[0], name="p", model="m", transport=transports[0], config=CONFIG
        ) as source,
        TargetEndpoint(
            LAYOUT, memories[1], name="d", model="m", transport=transports[1], config=CONFIG
        ) as target,
    ):
        yield Pair(source, target, view_of(source.record), got[0].reshape(8, -1))


def carry(pair: Pair, room: Room) -> None:
    into = pair.target.receive(room, prefill=pair.view, tokens=6, pages=[3, 1])
    out = pair.source.open(room)
    out.push((0, 6), [0, 1])
    out.close(b"token")
    assert into.wait(WAIT_S) == Done(b"token")
    assert out.wait(WAIT_S) == Done()
    into.wait_released(WAIT_S)
    out.wait_released(WAIT_S)


# ---------------------------------------------------------------- ends and statuses


def test_the_states_of_a_room_from_open_to_release(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=6, pages=[3, 1])
    assert (into.outcome, into.metadata, into.released) == (None, b"", False)
    out = pair.source.open("room")
    eventually(lambda: out.status is Status.WAITING)
    out.push((0, 4), [0])
    eventually(lambda: into.status is Status.MOVING)
    assert pair.target.statuses(["room", "never"]) == [Status.MOVING, None]
    # An engine combines ranks by the minimum: one failure fails the request.
    assert min(into.status, Status.FAILED) is Status.FAILED
    assert min(into.status, Status.DONE) is Status.MOVING
    out.push((4, 6), [1])
    out.close(b"token")
    assert into.wait(WAIT_S) == Done(b"token")
    into.wait_released(WAIT_S)
    assert (into.status, into.metadata, into.failure) == (Status.DONE, b"token", None)
    assert pair.target.statuses(["room"]) == [None]
    assert repr(into) == "<Incoming 'room' done>"
    half = pair.pages.shape[1] // 2
    assert (pair.pages[3] == 7).all()
    assert (pair.pages[1, :half] == 7).all()
    assert not pair.pages[1, half:].any()
    assert not pair.pages[[0, 2, 4, 5, 6, 7]].any()


def test_callbacks_and_await(pair: Pair) -> None:
    ends: list[Outcome] = []
    released = threading.Event()

    async def one() -> Outcome:
        into = pair.target.receive(1, prefill=pair.view, tokens=4, pages=[0])
        into.on_end(ends.append)
        into.on_release(released.set)
        # Cancelling the task does not affect the room.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await into
        out = pair.source.open(1)
        out.push((0, 4), [0])
        out.close()
        assert await out == Done()
        return await into

    assert asyncio.run(one()) == Done()
    assert released.wait(WAIT_S)
    assert ends == [Done()]


def test_a_late_callback_is_called_at_once(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0])
    into.abort()
    outcome = into.wait(WAIT_S)
    assert isinstance(outcome, Failure)
    into.wait_released(WAIT_S)
    heard: list[Outcome | None] = []
    into.on_end(heard.append)
    into.on_release(lambda: heard.append(None))
    assert heard == [outcome, None]


@pytest.mark.parametrize("who", ["source", "target"])
def test_either_side_may_abort(pair: Pair, who: str) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=8, pages=[0, 1])
    out = pair.source.open("room")
    out.push((0, 4), [0])
    eventually(lambda: into.status is Status.MOVING)
    (out if who == "source" else into).abort()
    for handle in (out, into):
        outcome = handle.wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.ABORTED
        handle.wait_released(WAIT_S)
        assert handle.status is Status.FAILED
    assert into.bad_pages == {"kv": [1]}
    # Calls after the failure are no error: they may cross it.
    out.push((4, 8), [1])
    out.close()
    out.abort()
    carry(pair, "next")


def test_a_room_without_a_peer_fails_at_its_deadline(pair: Pair) -> None:
    into = pair.target.receive("a", prefill=pair.view, tokens=4, pages=[0], deadline_s=0.3)
    out = pair.source.open("b", deadline_s=0.3)
    for handle in (into, out):
        outcome = handle.wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.DEADLINE
        handle.wait_released(WAIT_S)


def test_different_lengths_fail_the_room(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=8, pages=[0, 1])
    out = pair.source.open("room")
    out.push((0, 8), [0, 1])
    out.close(tokens=9)
    outcome = into.wait(WAIT_S)
    assert isinstance(outcome, Failure)
    assert outcome.code is FailureCode.TOKENS_DIFFER


def test_different_digests_fail_the_room(pair: Pair) -> None:
    """Same room and length but other tokens: no page is good, even if all bytes have arrived."""
    into = pair.target.receive("room", prefill=pair.view, tokens=8, pages=[0, 1], digest=b"B")
    out = pair.source.open("room")
    out.push((0, 8), [0, 1])
    out.close(b"first token", digest=b"A")
    for handle in (into, out):
        outcome = handle.wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.CONTENT_DIFFERS
        handle.wait_released(WAIT_S)
    assert into.metadata == b""
    assert into.bad_pages == {"kv": [0, 1]}
    carry(pair, "next")


def test_equal_digests_complete_the_room(pair: Pair) -> None:
    digest = digest_of([5, 6, 7, 8], model="m", dtype="bf16")
    into = pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0], digest=digest)
    out = pair.source.open("room")
    out.push((0, 4), [0])
    out.close(b"first token", digest=digest)
    assert into.wait(WAIT_S) == Done(b"first token")
    with pytest.raises(InputError, match="at most 64 bytes"):
        pair.target.receive("long", prefill=pair.view, tokens=4, pages=[0], digest=bytes(65))
    with pytest.raises(InputError, match="at most 64 bytes"):
        pair.source.open("long").close(digest=bytes(65))


def test_a_room_fails_if_less_is_pushed_than_requested(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=8, pages=[0, 1])
    out = pair.source.open("room")
    out.push((0, 4), [0])
    out.close(tokens=8)
    for handle in (into, out):
        outcome = handle.wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.NOT_ALL_PUSHED


class Later:
    """A GPU event that happens when a test says so."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


def test_a_push_waits_for_its_event(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=8, pages=[0, 1])
    out, computed = pair.source.open("room"), Later()
    out.push((0, 4), [0], after=computed)
    out.push((4, 8), [1])
    out.close(b"last")
    # Other rooms go on, and later steps of this room wait too.
    carry(pair, "other")
    assert into.status is Status.WAITING
    computed.happened = True
    assert into.wait(WAIT_S) == Done(b"last")


def test_a_failed_room_waits_for_no_event(pair: Pair) -> None:
    out = pair.source.open("room")
    out.push((0, 4), [0], after=Later())
    out.abort()
    assert isinstance(out.wait(WAIT_S), Failure)
    out.wait_released(WAIT_S)


class Broken:
    """An event of a GPU that has failed."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_failing_event_fails_its_room_only(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=8, pages=[0, 1])
    out = pair.source.open("room")
    out.push((0, 4), [0], after=Broken())
    out.push((4, 8), [1])
    out.close(b"last")
    failure = out.wait(WAIT_S)
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.INTERNAL
    assert "the event that a push waits for has failed" in failure.message
    assert "illegal memory access" in failure.message
    assert isinstance(into.wait(WAIT_S), Failure)
    assert not pair.pages.any()
    out.wait_released(WAIT_S)
    carry(pair, "next")


# ---------------------------------------------------------------- misuse


NOT_INTEGERS = ["4", None, 1.5, float("nan")]


@pytest.mark.parametrize("seconds", ["1", float("nan"), float("inf"), float("-inf")])
def test_invalid_deadlines_are_refused(pair: Pair, seconds: float) -> None:
    """With an infinite deadline, a room might never end."""
    with pytest.raises(InputError, match="deadline_s must be a finite number of seconds"):
        pair.source.open("room", deadline_s=seconds)
    with pytest.raises(InputError, match="deadline_s must be a finite number of seconds"):
        pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0], deadline_s=seconds)
    carry(pair, "room")


@pytest.mark.parametrize("prefill", [None, 7, {}, ["p"]])
def test_invalid_instances_are_refused(pair: Pair, prefill: InstanceView) -> None:
    with pytest.raises(InputError, match="prefill must be an instance's name or view"):
        pair.target.receive("room", prefill=prefill, tokens=4, pages=[0])
    carry(pair, "room")


@pytest.mark.parametrize("count", [*NOT_INTEGERS, -1, 1 << 31, 1 << 70])
def test_invalid_token_counts_are_refused(pair: Pair, count: int) -> None:
    with pytest.raises(InputError, match=r"tokens must be an integer from 0 to \d+, not"):
        pair.target.receive("room", prefill=pair.view, tokens=count, pages=[0])
    with pytest.raises(InputError, match=r"prefix must be an integer from 0 to \d+, not"):
        pair.target.receive("room", prefill=pair.view, tokens=4, prefix=count, pages=[0])
    with pytest.raises(InputError, match=r"tokens must be \(first, end\)"):
        pair.source.open("pushed").push((0, count), [0])
    if count is not None:
        with pytest.raises(InputError, match=r"tokens must be an integer from 0 to \d+, not"):
            pair.source.open("closed").close(tokens=count)
    carry(pair, "room")


@pytest.mark.parametrize("text", ["text", 7, None])
def test_values_that_are_not_bytes_are_refused(pair: Pair, text: bytes) -> None:
    out = pair.source.open("other")
    with pytest.raises(InputError, match=r"metadata must be bytes, not \w+; encode it"):
        out.close(text)
    with pytest.raises(InputError, match="a digest is bytes, not"):
        out.close(digest=text)
    with pytest.raises(InputError, match="a digest is bytes, not"):
        pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0], digest=text)
    carry(pair, "room")


@pytest.mark.parametrize("after", [7, "event", object()])
def test_invalid_events_are_refused(pair: Pair, after: Later) -> None:
    out = pair.source.open("other")
    with pytest.raises(InputError, match=r"after must be an event with query\(\)"):
        out.push((0, 4), [0], after=after)
    with pytest.raises(InputError, match=r"after must be an event with query\(\)"):
        out.close(after=after)
    carry(pair, "room")


@pytest.mark.parametrize("room", [-1, MAX_ID + 1, "", "x" * 257, "\ud800", 1.5, None, b"bytes"])
def test_invalid_room_ids_are_refused(pair: Pair, room: Room) -> None:
    with pytest.raises(InputError, match="a room's id must be an integer"):
        pair.source.open(room)
    with pytest.raises(InputError, match="a room's id must be an integer"):
        pair.target.receive(room, prefill=pair.view, tokens=4, pages=[0])
    carry(pair, "room")


@pytest.mark.parametrize("text", ["x" * 513, "\ud800", 7])
def test_invalid_tags_are_refused(pair: Pair, text: str) -> None:
    with pytest.raises(InputError, match="request and traceparent must be strings"):
        pair.source.open("room", request=text)
    with pytest.raises(InputError, match="request and traceparent must be strings"):
        pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0], traceparent=text)
    carry(pair, "room")


def test_an_open_room_cannot_be_opened_again(pair: Pair) -> None:
    pair.source.open("room")
    with pytest.raises(Misuse, match="'room' is open already; use another id"):
        pair.source.open("room")
    pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0])
    with pytest.raises(Misuse, match="'room' is open already; use another id"):
        pair.target.receive("room", prefill=pair.view, tokens=4, pages=[0])


def test_the_id_of_a_released_room_can_be_reused(pair: Pair) -> None:
    for _ in range(3):
        carry(pair, "room")


def test_wrong_pushes_raise_at_the_caller(pair: Pair) -> None:
    out = pair.source.open("room")
    out.push((0, 4), [0])
    with pytest.raises(Misuse, match=r"some of the tokens .* were pushed before"):
        out.push((3, 6), [0, 1])
    with pytest.raises(InputError, match="touch 1 pages of group 'kv', but 2 were given"):
        out.push((4, 6), [1, 2])
    with pytest.raises(InputError, match=r"pages 0\.\.7"):
        out.push((4, 6), [8])
    for tokens in [(4, 4), (6, 4), (-4, 0)]:
        with pytest.raises(InputError, match="0 <= first < end"):
            out.push(tokens, [1])
    with pytest.raises(InputError, match="metadata must have at most"):
        out.close(bytes(MAX_METADATA + 1))
    out.close()
    with pytest.raises(Misuse, match="is closed; push"):
        out.push((4, 6), [1])
    with pytest.raises(Misuse, match="is closed; prepare"):
        out.prepare((4, 6), [1])
    with pytest.raises(Misuse, match="is closed; close"):
        out.close()


def test_chunks_may_be_pushed_in_any_order(pair: Pair) -> None:
    into = pair.target.receive("room", prefill=pair.view, tokens=18, pages=[3, 1, 4, 0, 6])
    out = pair.source.open("room")
    out.push((14, 18), [5, 0])
    with pytest.raises(InputError, match="names other pages than before for the same tokens"):
        out.push((4, 14), [2, 3, 7])
    out.push((4, 14), [2, 3, 5])
    out.push((0, 4), [6])
    out.close(b"token")
    assert into.wait(WAIT_S) == Done(b"token")


def test_wrong_layers_raise_at_the_caller(pair: Pair) -> None:
    out = pair.source.open("room")
    for layers in [(0, 2), (1, 1), (-1, 1)]:
        with pytest.raises(InputError, match="0 <= first < end <= 1, not"):
            out.push((0, 4), [0], layers=layers)
    out.push((0, 4), [0], layers=(0, 1))
    with pytest.raises(Misuse, match=r"some of the tokens \[0, 4\) of layers \[0, 1\) were pushed"):
        out.push((0, 4), [0])


def test_receiving_by_name_needs_a_discovery_service(pair: Pair) -> None:
    with pytest.raises(InputError, match="takes a discovery service"):
        pair.target.receive("room", prefill="p", tokens=4, pages=[0])


@pytest.mark.parametrize("name", ["", " ", "-x", "ü", "x" * 257])
def test_invalid_instance_names_are_refused(name: str) -> None:
    transport = make_transport("shm")
    memory = Memory.allocate(LAYOUT, 0, 1, transport.allocate)
    for kind in (SourceEndpoint, TargetEndpoint):
        with pytest.raises(InputError, match="is not a valid instance name"):
            kind(LAYOUT, memory, name=name, model="m", transport=transport)


def test_another_model_or_layout_is_refused(pair: Pair) -> None:
    for view in (
        replace(pair.view, fingerprint="another model"),
        replace(pair.view, layout=layout(HYBRID)),
    ):
        into = pair.target.receive("room", prefill=view, tokens=4, pages=[0])
        outcome = into.wait(WAIT_S)
        assert isinstance(outcome, Failure)
        assert outcome.code is FailureCode.REFUSED
        into.wait_released(WAIT_S)
    carry(pair, "good")


def test_a_closed_endpoint_fails_its_rooms_and_refuses_new_ones(pair: Pair) -> None:
    out = pair.source.open("room")
    assert pair.source.close()
    assert isinstance(out.outcome, Failure)
    assert out.released
    with pytest.raises(Misuse, match="can't be opened: this endpoint is closing"):
        pair.source.open("late")
    assert pair.source.close()


def test_all_pages_of_a_room_that_never_started_are_bad(pair: Pair) -> None:
    into = pair.target.receive(
        "too-late", prefill=pair.view, tokens=10, prefix=4, pages=[5, 3, 1], deadline_s=1e-9
    )
    assert isinstance(into.wait(WAIT_S), Failure)
    # The first page holds the cached prefix.
    assert into.bad_pages == {"kv": [3, 1]}
