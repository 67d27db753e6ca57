"""Log lines of a process: one format, with repeated lines counted.

    2026-11-15 12:00:00,123 WARNING decode-0/1 room-failed room=17 code=deadline request=5f0c...

Time, level, the endpoint (an instance and its rank, or a part's name), the event, and its
``key=value`` pairs with those of ``context.py``.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO

from kvferry.telemetry.logs.context import annotated
from kvferry.telemetry.logs.repeats import Hidden, Repeats

WINDOW_S = 10.0
# Shown per window: of identical lines, and of lines with one format string.
SAME_LINES, ALIKE_LINES = 5, 200
# Length at which lines are cut before comparison.
KEY_CHARS = 300
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


class LogSettings(NamedTuple):
    """The name in each line (a part, or an instance and its rank), and the lowest level shown."""

    name: str
    level: str
    rank: int | None = None

    @property
    def endpoint(self) -> str:
        """The endpoint as each line shows it."""
        return self.name if self.rank is None else f"{self.name}/{self.rank}"


class LineFormatter(logging.Formatter):
    """Formats an event as one line; escapes line breaks that callers may have sent."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__("%(asctime)s %(levelname)s %(endpoint)s %(message)s")
        self.settings = settings

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Return the line, without the traceback that may follow."""
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage())
        fields = {"endpoint": self.settings.endpoint, "message": annotated(text)}
        return super().formatMessage(logging.makeLogRecord(record.__dict__ | fields))


class RepeatKey(NamedTuple):
    """Identity of a record, by its text or by its format string."""

    logger: str
    level: int
    text: str


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes lines; replaces repeated lines by their number."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._same: Repeats[RepeatKey] = Repeats(SAME_LINES, WINDOW_S)
        self._alike: Repeats[RepeatKey] = Repeats(ALIKE_LINES, WINDOW_S)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless its line has been repeated too often."""
        now = self._clock()
        for hidden in (*self._same.over(now), *self._alike.over(now)):
            self._report(hidden)
        line, form = record.getMessage()[:KEY_CHARS], str(record.msg)[:KEY_CHARS]
        same = self._same.shows(RepeatKey(record.name, record.levelno, line), now)
        if same and self._alike.shows(RepeatKey(record.name, record.levelno, form), now):
            super().emit(record)

    def close(self) -> None:
        """Report the repetitions that are not reported yet."""
        for hidden in (*self._same.rest(), *self._alike.rest()):
            self._report(hidden)
        super().close()

    def _report(self, hidden: Hidden[RepeatKey]) -> None:
        key, times = hidden
        text = f"repeated times={times} seconds={WINDOW_S:g} line={key.text!r}"
        super().emit(
            logging.LogRecord(key.logger, key.level, __file__, 0, text, args=None, exc_info=None)
        )


def install(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Install the handler on the root logger, unless the program has configured logging."""
    handler = CountingHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(settings))
    logging.basicConfig(level=settings.level, handlers=[handler])


def installed() -> LogSettings | None:
    """Return the settings of ``install`` in this process; None if it was not called."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter):
            return handler.formatter.settings
    return None
