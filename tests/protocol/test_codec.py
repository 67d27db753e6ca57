"""Encoding and decoding of frames, valid and arbitrary ones."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.digest import MAX_DIGEST
from kvferry.errors import KvferryError
from kvferry.ids import MAX_ID, Generation, Peer, Room, Serial, Session, SlotIndex
from kvferry.layout import Layout, Span, attention
from kvferry.plan import Block, PoolMap, Request, contiguous_pools
from kvferry.plan.plan import MAX_TOKENS
from kvferry.protocol.codec import (
    MAGIC,
    MAX_FRAME_BYTES,
    BadFrame,
    FrameFault,
    decode,
    encode,
)
from kvferry.protocol.messages import (
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_CREDITS,
    MAX_METADATA,
    MAX_PAGES,
    MAX_SUMS,
    VERSION,
    Abort,
    Accept,
    Arrived,
    Ask,
    Body,
    Close,
    Complete,
    Credit,
    Drained,
    Envelope,
    Grant,
    Heartbeat,
    Hello,
    Holding,
    NoSession,
    Offer,
    PageTableMessage,
    RefusalCode,
    Refuse,
    Staging,
    StatusPoll,
    TransportLack,
    TransportOffer,
    TransportOffers,
    Want,
    Welcome,
)
from kvferry.protocol.outcome import MAX_TEXT, Failure, FailureCode
from kvferry.testing.strategies import layouts, specs

# ---------------------------------------------------------------- strategies

counts = st.integers(0, MAX_COUNT)
texts = st.text(max_size=20)
blobs = st.binary(max_size=40)
chains = st.integers(1, 4).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n))
rooms: st.SearchStrategy[Room] = st.integers(0, MAX_ID) | st.text(min_size=1, max_size=256)
generations = counts.map(Generation)
serials = counts.map(Serial)
peers = st.builds(Peer, st.text(min_size=1, max_size=20), st.integers(0, (1 << 16) - 1))
ids = st.integers(0, MAX_ID)
sessions = st.builds(Session, ids, ids, ids, ids)
spans = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda p: Span(p[0], sum(p)))
blocks = st.lists(st.builds(Block, texts, spans, spans), max_size=4).map(tuple)
failures = st.builds(Failure, st.sampled_from(FailureCode), texts)
stagings = st.builds(Staging, counts, st.integers(0, 1 << 20))
transports = st.builds(
    TransportOffers,
    st.lists(st.builds(TransportOffer, texts, texts, blobs), max_size=4).map(tuple),
    st.lists(st.builds(TransportLack, texts, texts), max_size=4).map(tuple),
)
pages = st.lists(st.integers(0, (1 << 62) - 1), max_size=6).map(tuple)
tables = st.lists(st.builds(PageTableMessage, texts, pages, st.integers(0, MAX_TOKENS)), max_size=3)
credits_ = st.builds(Credit, serials, st.integers(0, 1 << 20).map(SlotIndex))
requests = st.tuples(st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS)).map(
    lambda pair: Request(max(pair), min(pair))
)
remaining = st.floats(0, 1e7, exclude_min=True)
some_layouts = specs().flatmap(layouts)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    layout = draw(some_layouts)
    rank = draw(st.integers(0, layout.num_ranks - 1))
    pools = contiguous_pools(layout, rank, draw(st.integers(1, 9))).map
    return Hello(draw(texts), layout, pools, draw(stagings), draw(blobs), draw(transports))


BODIES: dict[type, st.SearchStrategy[Any]] = {
    Hello: hellos(),
    Welcome: st.builds(Welcome, texts, some_layouts, texts, blobs, texts),
    Refuse: st.builds(Refuse, st.sampled_from(RefusalCode), texts),
    NoSession: st.just(NoSession()),
    Heartbeat: st.just(Heartbeat()),
    Offer: st.builds(Offer, rooms, generations, requests, tables.map(tuple), remaining),
    Ask: st.builds(Ask, rooms, generations, chains, st.integers(0, MAX_TOKENS), remaining),
    Holding: st.builds(Holding, rooms, generations, st.integers(0, MAX_TOKENS)),
    Accept: st.builds(Accept, rooms, generations),
    Want: st.builds(Want, rooms, generations, counts),
    Grant: st.builds(Grant, rooms, generations, st.lists(credits_, max_size=4).map(tuple)),
    Arrived: st.builds(Arrived, rooms, generations, blocks, st.none() | serials),
    StatusPoll: st.builds(StatusPoll, rooms, generations, st.lists(serials, max_size=4).map(tuple)),
    Close: st.builds(
        Close,
        rooms,
        generations,
        st.integers(0, MAX_TOKENS),
        blocks,
        st.none() | blobs,
        st.binary(max_size=MAX_DIGEST),
    ),
    Complete: st.builds(Complete, rooms, generations),
    Abort: st.builds(Abort, rooms, generations, failures, st.booleans()),
    Drained: st.builds(Drained, rooms, generations, failures, counts),
}
TYPES = pytest.mark.parametrize("kind", list(BODIES), ids=lambda kind: kind.__name__)
seqs = st.integers(0, MAX_COUNT)
heads = st.tuples(peers, ids, sessions, seqs)
any_body = st.sampled_from(list(BODIES)).flatmap(lambda kind: BODIES[kind])
envelopes = st.builds(Envelope, peers, ids, sessions, seqs, any_body)

SPEC = attention(layers=2, kv_heads=2, head_dim=2)
LAYOUT = Layout(SPEC)
HELLO = Hello("m", LAYOUT, contiguous_pools(LAYOUT, 0, 4).map)


def test_every_message_has_a_strategy() -> None:
    assert set(BODIES) == set(get_args(Body))


@TYPES
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_message_survives_encoding(kind: type, data: st.DataObject) -> None:
    envelope = Envelope(*data.draw(heads), data.draw(BODIES[kind]))
    assert decode(encode(envelope)) == envelope


# ---------------------------------------------------------------- hostile bytes


def assert_taken_or_refused(frame: bytes) -> None:
    result = decode(frame)
    assert isinstance(result, Envelope | BadFrame)
    if isinstance(result, Envelope):
        assert decode(encode(result)) == result


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(frame: bytes) -> None:
    assert_taken_or_refused(frame)


@settings(max_examples=300, deadline=None)
@given(envelopes, st.data())
def test_a_valid_frame_with_a_few_bytes_changed(envelope: Envelope, data: st.DataObject) -> None:
    frame = bytearray(encode(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    assert_taken_or_refused(bytes(frame))


@settings(max_examples=100, deadline=None)
@given(envelopes, st.data())
def test_a_truncated_frame_is_refused(envelope: Envelope, data: st.DataObject) -> None:
    frame = encode(envelope)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert isinstance(decode(frame[:cut]), BadFrame)
    assert isinstance(decode(frame + b"\x00"), BadFrame)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | texts
    | blobs,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
TAGS = [msgspec.inspect.type_info(kind).tag for kind in BODIES]  # type: ignore[attr-defined]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(TAGS), st.lists(json_like, max_size=7))
def test_valid_tag_with_arbitrary_fields(tag: str, fields: list[Any]) -> None:
    assert_taken_or_refused(raw([tag, *fields]))


@pytest.mark.parametrize("byte", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xc4"])
def test_deep_nesting_is_refused(byte: bytes) -> None:
    for frame in (byte * 100_000, raw_bytes(byte * 100_000)):
        assert isinstance(decode(frame), BadFrame)


HUGE = [
    b"\xdd\x7f\xff\xff\xff",  # an array of 2**31 - 1
    b"\xdf\x7f\xff\xff\xff",  # a map
    b"\xdb\x7f\xff\xff\xff",  # a string
    b"\xc6\x7f\xff\xff\xff",  # bytes
    b"\xc9\x7f\xff\xff\xff\x01",  # an extension
]


@pytest.mark.parametrize("claim", HUGE)
@pytest.mark.parametrize("where", ["frame", "body", "blocks", "pages"])
def test_claimed_length_allocates_nothing(claim: bytes, where: str) -> None:
    tail = claim + b"\x00" * 1000
    frame = {
        "frame": tail,
        "body": raw_bytes(tail),
        "blocks": raw_bytes(b"\x95\xa7arrived\x01\x01" + tail),
        "pages": raw_bytes(
            b"\x96\xa5offer\x01\x01\x82\xaanum_tokens\x01\xa6prefix\x00\x91\x92\xa1g" + tail
        ),
    }[where]
    tracemalloc.start()
    try:
        result = decode(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(result, BadFrame)
    assert peak < 1 << 20


# ---------------------------------------------------------------- typed refusals


def raw(body: Any, **changed: Any) -> bytes:
    head = {
        "magic": MAGIC,
        "version": VERSION,
        "sender": ["a", 0],
        "incarnation": 1,
        "session": [1, 1],
        "seq": 1,
    }
    return msgspec.msgpack.encode([*(head | changed).values(), body])


def raw_bytes(body: bytes) -> bytes:
    return raw(None)[:-1] + body


def fault(frame: bytes) -> FrameFault:
    result = decode(frame)
    assert isinstance(result, BadFrame), result
    assert (result.header is not None) == (
        result.fault in (FrameFault.VERSION, FrameFault.MALFORMED)
    )
    return result.fault


def test_handmade_frame_is_valid() -> None:
    assert isinstance(decode(raw(["heartbeat"])), Envelope)
    assert isinstance(decode(raw(OFFER)), Envelope)
    assert isinstance(decode(raw(["drained", 1, 1, FAILURE, 1])), Envelope)
    assert isinstance(decode(raw(["abort", 1, 1, FAILURE, True])), Envelope)
    assert isinstance(decode(raw_bytes(msgspec.msgpack.encode(HELLO))), Envelope)


def test_other_version_includes_the_sender() -> None:
    result = decode(raw({"any": "thing"}, version=VERSION + 1))
    assert isinstance(result, BadFrame)
    assert result.fault is FrameFault.VERSION
    assert result.header is not None
    assert (result.header.sender, result.header.session) == (Peer("a", 0), Session(1, 1))


@pytest.mark.parametrize(
    "changed",
    [
        {"magic": "kvg"},
        {"magic": "k" * 9},
        {"version": -1},
        {"version": 1 << 16},
        {"sender": ["", 0]},
        {"sender": ["x" * 257, 0]},
        {"sender": ["a", -1]},
        {"sender": ["a", 1 << 16]},
        {"incarnation": -1},
        {"incarnation": 1 << 63},
        {"session": [1, -1]},
        {"session": [1]},
        {"session": [1, 1, -1, 0]},
        {"session": [1, 1, 0, 1 << 63]},
        {"seq": -1},
        {"seq": MAX_COUNT + 1},
    ],
    ids=str,
)
def test_invalid_header_is_foreign(changed: dict[str, Any]) -> None:
    assert fault(raw(["heartbeat"], **changed)) is FrameFault.FOREIGN


def test_foreign_protocols() -> None:
    for frame in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95.", b"{}", b"\xc1", b"\xff" * 64):
        assert fault(frame) is FrameFault.FOREIGN


def test_oversized_frame_is_not_decoded() -> None:
    assert fault(b"\x00" * (MAX_FRAME_BYTES + 1)) is FrameFault.OVERSIZED
    tables_ = tuple(
        PageTableMessage(f"g{i}", tuple(range(1 << 40, (1 << 40) + (1 << 19)))) for i in range(2)
    )
    offer = Offer(1, Generation(1), Request(1), tables_, 1.0)
    with pytest.raises(KvferryError, match="above the limit"):
        encode(Envelope(Peer("a", 0), 1, Session(1, 1), 1, offer))


REQUEST = {"num_tokens": 8, "prefix": 0}
OFFER = ["offer", 1, 1, REQUEST, [["kv", [0, 1], 0]], 1.0, [7, 16384]]
FAILURE = {"code": "aborted", "message": ""}
BLOCK = ["kv", [0, 1], [0, 1]]


def offer(**changed: Any) -> list[Any]:
    names = ("tag", "room", "generation", "request", "tables", "remaining", "proof")
    fields = dict(zip(names, OFFER, strict=True))
    return list((fields | changed).values())


MALFORMED: dict[str, Any] = {
    "no tag": [],
    "unknown tag": ["hullo"],
    "too few fields": ["accept", 1],
    "digest long": ["close", 1, 1, 8, [], None, bytes(MAX_DIGEST + 1)],
    "room below": offer(room=-1),
    "room above": offer(room=1 << 63),
    "room empty": offer(room=""),
    "room long": offer(room="x" * 257),
    "room float": offer(room=1.5),
    "room none": offer(room=None),
    "generation below": offer(generation=-1),
    "generation above": offer(generation=MAX_COUNT + 1),
    "prefix above tokens": offer(request={"num_tokens": 4, "prefix": 5}),
    "prefix below": offer(request={"num_tokens": 4, "prefix": -1}),
    "tokens above": offer(request={"num_tokens": MAX_TOKENS + 1, "prefix": 0}),
    "page below": offer(tables=[["kv", [-1], 0]]),
    "page -8": offer(tables=[["kv", [0, -8], 0]]),
    "page above": offer(tables=[["kv", [1 << 62], 0]]),
    "pages too many": offer(tables=[["kv", [0] * (MAX_PAGES + 1), 0]]),
    "first page below": offer(tables=[["kv", [0], -1]]),
    "tables too many": offer(tables=[["kv", [0], 0]] * 65),
    "group long": offer(tables=[["g" * (MAX_TEXT + 1), [0], 0]]),
    "proof of a negative seed": offer(proof=[-1, 1]),
    "proof of a large seed": offer(proof=[1 << 63, 1]),
    "proof of no cells": offer(proof=[1, 0]),
    "proof of too many cells": offer(proof=[1, (1 << 16) + 1]),
    "sums long": ["close", 1, 1, 8, [], None, b"", bytes(MAX_SUMS + 1)],
    "remaining nan": offer(remaining=math.nan),
    "remaining inf": offer(remaining=math.inf),
    "remaining zero": offer(remaining=0.0),
    "remaining long": offer(remaining=1.1e7),
    "want below": ["want", 1, 1, -1],
    "want above": ["want", 1, 1, MAX_COUNT + 1],
    "serial below": ["grant", 1, 1, [[-8, 0]]],
    "slot below": ["grant", 1, 1, [[0, -1]]],
    "slot above": ["grant", 1, 1, [[0, (1 << 20) + 1]]],
    "credits too many": ["grant", 1, 1, [[0, 0]] * (MAX_CREDITS + 1)],
    "note serial below": ["arrived", 1, 1, [], -8],
    "blocks too many": ["arrived", 1, 1, [BLOCK] * (MAX_BLOCKS + 1), None],
    "span backwards": ["arrived", 1, 1, [["kv", [2, 1], [0, 1]]], None],
    "span below": ["arrived", 1, 1, [["kv", [0, 1], [-8, 1]]], None],
    "serials too many": ["nudge", 1, 1, [0] * (MAX_CREDITS + 1)],
    "nudge serial below": ["nudge", 1, 1, [-8]],
    "close tokens below": ["close", 1, 1, -1, [], None],
    "close tokens above": ["close", 1, 1, MAX_TOKENS + 1, [], None],
    "metadata long": ["close", 1, 1, 1, [], bytes(MAX_METADATA + 1)],
    "unknown failure": ["abort", 1, 1, {"code": "bored", "message": ""}],
    "accepted no truth": ["abort", 1, 1, FAILURE, 1],
    "text long": ["drained", 1, 1, FAILURE | {"message": "x" * (MAX_TEXT + 1)}, 1],
    "heard missing": ["drained", 1, 1, FAILURE],
    "heard below": ["drained", 1, 1, FAILURE, -1],
    "heard above": ["drained", 1, 1, FAILURE, MAX_COUNT + 1],
    "unknown refusal": ["refuse", "bored", ""],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_field_out_of_bounds_is_malformed(name: str) -> None:
    assert fault(raw(MALFORMED[name])) is FrameFault.MALFORMED


def hello(**changed: Any) -> list[Any]:
    layout: Any = msgspec.to_builtins(LAYOUT) | changed
    return ["hello", "m", layout, msgspec.to_builtins(PoolMap(())), [0, 0], b""]


BAD_LAYOUTS: dict[str, Any] = {
    "tp zero": {"sharding": {"type": "parallel", "tp": 0}},
    "tp does not fit": {"sharding": {"type": "parallel", "tp": 3}},
    "too many ranks": {"sharding": {"type": "parallel", "tp": 1 << 20}},
    "pp above layers": {"sharding": {"type": "parallel", "pp": 3}},
    "stages": {"sharding": {"type": "parallel", "pp": 2, "stages": [2, 1]}},
    "no ranks": {"sharding": {"type": "stated", "ranks": []}},
    "lead outside": {"sharding": {"type": "stated", "ranks": [[]], "lead": 1}},
    "unknown sharding": {"sharding": {"type": "magic"}},
    "stated outside": {
        "sharding": {
            "type": "stated",
            "ranks": [[{"group": "x", "layers": [0, 1], "units": [0, 1]}]],
        }
    },
    "dp zero": {"dp": 0},
    "page zero": {"page_tokens": 0},
    "page huge": {"page_tokens": 1 << 40},
    "page of no group": {"group_pages": [["other", 16]]},
    "order": {"order": "dhn"},
    "no groups": {"spec": {"num_layers": 2, "groups": []}},
    "no layers": {"spec": {"num_layers": 0, "groups": []}},
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_impossible_layout_is_malformed(name: str) -> None:
    assert isinstance(decode(raw(hello())), Envelope)
    assert fault(raw(hello(**BAD_LAYOUTS[name]))) is FrameFault.MALFORMED


def test_fields_of_a_proof_may_be_left_out() -> None:
    envelope = decode(raw(OFFER[:-1]))
    assert isinstance(envelope, Envelope)
    assert isinstance(envelope.body, Offer)
    assert envelope.body.proof is None


def test_unknown_fields_are_ignored() -> None:
    assert isinstance(decode(raw([*OFFER, "from", "the future"])), Envelope)


@pytest.mark.parametrize(
    "body", [Want("r", Generation(1), 1 << 70), Want("\ud800", Generation(1), 1)]
)
def test_unencodable_message_raises(body: Want) -> None:
    """The error fails a room, not the sending thread."""
    with pytest.raises(KvferryError, match="no frame can carry this Want"):
        encode(Envelope(Peer("p", 0), 1, Session(1, 1), 1, body))
