"""The log of a process: one form for every line, and repetitions counted.

    2026-11-15 12:00:00,123 WARNING decode-0/1 room-failed room=17 code=deadline request=5f0c...

Time, level, the endpoint that writes (an instance and its rank, or a part's name),
the event, and what it is about (``context.py``).
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
# Of one and the same line, and of lines that differ in their values only.
SAME_LINES, ALIKE_LINES = 5, 200
# Longer than this no two lines are compared.
KEY_CHARS = 300
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


class LogSettings(NamedTuple):
    """Who writes (a part, or a rank of an instance), and from which level on."""

    name: str
    level: str
    rank: int | None = None

    @property
    def endpoint(self) -> str:
        """As it stands in every line."""
        return self.name if self.rank is None else f"{self.name}/{self.rank}"


class LineFormatter(logging.Formatter):
    """One line for each event; what callers sent can't begin another."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__("%(asctime)s %(levelname)s %(endpoint)s %(message)s")
        self.settings = settings

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line, without a traceback that may follow it."""
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.getMessage())
        fields = {"endpoint": self.settings.endpoint, "message": annotated(text)}
        return super().formatMessage(logging.makeLogRecord(record.__dict__ | fields))


class RepeatKey(NamedTuple):
    """What makes two records the same, or alike."""

    logger: str
    level: int
    text: str


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes lines, and instead of the same line for ever how often it came."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._same: Repeats[RepeatKey] = Repeats(SAME_LINES, WINDOW_S)
        self._alike: Repeats[RepeatKey] = Repeats(ALIKE_LINES, WINDOW_S)

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, unless it was written often enough."""
        now = self._clock()
        for hidden in (*self._same.over(now), *self._alike.over(now)):
            self._tell(hidden)
        line, form = record.getMessage()[:KEY_CHARS], str(record.msg)[:KEY_CHARS]
        same = self._same.shows(RepeatKey(record.name, record.levelno, line), now)
        if same and self._alike.shows(RepeatKey(record.name, record.levelno, form), now):
            super().emit(record)

    def close(self) -> None:
        """Tell what was not told yet."""
        for hidden in (*self._same.rest(), *self._alike.rest()):
            self._tell(hidden)
        super().close()

    def _tell(self, hidden: Hidden[RepeatKey]) -> None:
        key, times = hidden
        text = f"repeated times={times} seconds={WINDOW_S:g} line={key.text!r}"
        super().emit(
            logging.LogRecord(key.logger, key.level, __file__, 0, text, args=None, exc_info=None)
        )


def install(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Write this process's log from now on, unless it is somebody else's already."""
    handler = CountingHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(settings))
    logging.basicConfig(level=settings.level, handlers=[handler])


def installed() -> LogSettings | None:
    """What ``install`` was told in this process; None where the log is somebody else's."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter):
            return handler.formatter.settings
    return None
