"""Splitting of event streams into whole events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.streams import WholeEvents


@given(st.lists(st.binary(min_size=1, max_size=8)), st.lists(st.integers(1, 9)))
def test_events_are_whole_and_unchanged(parts: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"data: " + part.replace(b"\n", b"") + b"\n\n" for part in parts)
    events, sent, rest = WholeEvents(), b"", stream + b"data: half"
    for cut in [*cuts, len(rest)]:
        whole = events.take(rest[:cut])
        assert whole == b"" or whole.endswith(b"\n\n")
        sent, rest = sent + whole, rest[cut:]
    assert sent == stream


@pytest.mark.parametrize(
    ("stream", "ended"),
    [
        (b"data: 1\n\ndata: [DONE]", False),
        (b"data: 1\n\ndata: [DONE]\n\n", True),
        (b'data: 1\n\ndata: {"error": {}}\n\n', True),
        # A chunk that only keeps the connection open has no content.
        (b"data: [DONE]\n\n: still here\n\n", True),
        (b"data: [DONE]\n\ndata: 2\n\n", False),
    ],
)
def test_end_of_stream_is_detected(stream: bytes, ended: bool) -> None:
    events = WholeEvents()
    for byte in stream:
        events.take(bytes([byte]))
    assert events.ended is ended


def test_events_may_end_with_crlf() -> None:
    events = WholeEvents()
    assert events.take(b"data: 1\r\n\r\ndata: [DONE]\r\n\r\ndata") == (
        b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n"
    )
    assert events.ended


def test_an_endless_event_is_bounded() -> None:
    events = WholeEvents(most_bytes=100)
    events.take(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        events.take(b"x" * 90)
