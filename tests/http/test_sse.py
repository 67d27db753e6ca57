"""Server-sent events from a stream of bytes in arbitrary chunks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.http.sse import EventReader, ServerEvent


def read(*portions: bytes, most: int = 1 << 20) -> list[str]:
    reader = EventReader(most)
    found = [event for portion in portions for event in reader.feed(portion)]
    events = found + list(reader.end())
    return [event.data for event in events if event.data is not None]


STREAM = (
    b": a comment\r\n\r\ndata: one\r\n\r\nevent: x\nid: 7\ndata:two\ndata: lines\n\n"
    b'\n\ndata: {"a":"\xc3\xa9"}\n\ndata: last'
)
EVENTS = ["one", "two\nlines", '{"a":"é"}', "last"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_chunk_boundaries_do_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    portions = [STREAM[a:b] for a, b in itertools.pairwise(places)]
    assert read(*portions) == EVENTS


def test_an_event_is_yielded_once_complete() -> None:
    reader = EventReader(100)
    assert list(reader.feed(b"data: a\n")) == []
    assert list(reader.feed(b"\ndata: b")) == [ServerEvent(b"data: a\n\n", "a")]


@given(st.lists(st.integers(0, len(STREAM))))
def test_raw_bytes_are_unchanged(cuts: list[int]) -> None:
    reader = EventReader(1 << 20)
    places = [0, *sorted(cuts), len(STREAM)]
    raw = b"".join(e.raw for a, b in itertools.pairwise(places) for e in reader.feed(STREAM[a:b]))
    assert raw == STREAM.removesuffix(b"data: last")


def test_a_comment_is_an_event_without_data() -> None:
    assert list(EventReader(100).feed(b": ping\n\n")) == [ServerEvent(b": ping\n\n")]
    assert list(EventReader(100).feed(b"data:\n\n")) == [ServerEvent(b"data:\n\n", "")]


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        read(b"data: " + b"x" * 60, b"x" * 60, most=100)
    # Many small ones may be more than that.
    assert len(read(*[b"data: x\n\n"] * 50, most=100)) == 50
