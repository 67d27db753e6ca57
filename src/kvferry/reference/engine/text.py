"""Text out of tokens, as it can be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one of them.
MAX_PENDING = 4


class Detokenizer:
    """Text of a growing list of tokens.

    The text of a token depends on those before it, so a little context is decoded
    again each time. A character whose bytes are still coming is held back.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._pending.append(token)
        before, both = self._texts()
        if both.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING:
            return ""
        self._context, self._pending = self._pending, []
        return both[len(before) :]

    def flush(self) -> str:
        """What is held back, also if it is half a character."""
        before, both = self._texts()
        self._context, self._pending = [*self._context, *self._pending], []
        return both[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._context), self._decode(self._context + self._pending)


class StopFilter:
    """Text up to the first stop string; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What can be shown after this text."""
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
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of ``text`` that ``stop`` begins with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


class TextStream:
    """One answer's text: ``push`` each token, then ``end`` once."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._filter.stopped

    def push(self, token: int) -> str:
        """What can be shown after this token."""
        return self._filter.push(self._detokenizer.push(token))

    def end(self) -> str:
        """What is left to show, now that no more tokens come."""
        if self.stopped:
            return ""
        last = self._filter.push(self._detokenizer.flush())
        return last if self.stopped else last + self._filter.flush()
