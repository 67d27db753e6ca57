"""Tags: a room's request id and trace context, for logs and traces only."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import InputError

MAX_TAG = 512


class RoomTag(NamedTuple):
    """The engine's request id and the W3C ``traceparent`` of the request's trace."""

    request: str = ""
    traceparent: str = ""

    @staticmethod
    def of(request: str, traceparent: str) -> RoomTag:
        """Return a tag; raise ``InputError`` unless both are short text that UTF-8 can encode."""
        for text in (request, traceparent):
            if not isinstance(text, str) or len(text) > MAX_TAG or not _is_encodable(text):
                raise InputError(
                    f"request and traceparent must be strings of at most {MAX_TAG} characters, "
                    f"not {text!r:.300}"
                )
        return RoomTag(request, traceparent) if request or traceparent else NO_TAG


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


NO_TAG = RoomTag()
