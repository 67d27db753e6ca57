"""Text from tokens as it can be shown: whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one of them.
MAX_PENDING = 4


class TextStream:
    """One answer's text: ``push`` each token, then ``end`` once.

    An incomplete character is held back, and so is the beginning of a stop string. The text of
    a token depends on those before it, so a little context is decoded again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._context: list[int] = []
        self._pending: list[int] = []
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that can be shown after this token."""
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING:
            return ""
        self._context, self._pending = self._pending, []
        return self._until_stop(text)

    def end(self) -> str:
        """Return the rest of the text, once no more tokens come."""
        if self.stopped:
            return ""
        last = self._until_stop(self._pending_text())
        return last if self.stopped else last + self._held

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _until_stop(self, text: str) -> str:
        whole = self._held + text
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped = True
            return whole[: min(found)]
        keep = max((_overlap(whole, stop) for stop in self._stops), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
