"""Text from tokens as it can be shown: whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one of them.
MAX_PENDING = 4


class Detokenizer:
    """Text of a growing list of tokens; an incomplete character is held back.

    The text of a token depends on those before it, so a little context is decoded again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return the text held back, even if it is half a character."""
        text = self._text()
        self._context, self._pending = [*self._context, *self._pending], []
        return text

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]


class StopFilter:
    """Text up to the first stop string; a possible beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return the text that can be shown after this piece."""
        whole = self._held + text
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return whole[: min(found)]
        keep = max((_overlap(whole, stop) for stop in self._stops), default=0)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """Return the text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


class TextStream:
    """One answer's text: ``push`` each token, then ``end`` once."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._filter.stopped

    def push(self, token: int) -> str:
        """Return the text that can be shown after this token."""
        return self._filter.push(self._detokenizer.push(token))

    def end(self) -> str:
        """Return the rest of the text, once no more tokens come."""
        if self.stopped:
            return ""
        last = self._filter.push(self._detokenizer.flush())
        return last if self.stopped else last + self._filter.flush()
