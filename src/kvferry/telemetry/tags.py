"""Tags: whose room it is, by its engine's words. For logs and traces alone."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.errors import InputError

MAX_TAG = 512


class RoomTag(NamedTuple):
    """The request's id, and the W3C ``traceparent`` under which it is traced."""

    request: str = ""
    traceparent: str = ""

    @staticmethod
    def of(request: str, traceparent: str) -> RoomTag:
        """Refuses what is no short text."""
        for text in (request, traceparent):
            if not isinstance(text, str) or len(text) > MAX_TAG or not _is_whole(text):
                raise InputError(
                    f"request and traceparent are texts of at most {MAX_TAG} characters, "
                    f"not {text!r:.300}"
                )
        return RoomTag(request, traceparent) if request or traceparent else NOBODYS


def _is_whole(text: str) -> bool:
    """Whether it can be sent: half a surrogate can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


NOBODYS = RoomTag()
