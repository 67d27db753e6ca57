"""The form of a line, and a log that does not write the same for ever."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from kvferry.telemetry.logs.context import REQUEST_HEADER, about, in_room, onward, request_id
from kvferry.telemetry.logs.lines import (
    ALIKE_LINES,
    SAME_LINES,
    CountingHandler,
    LineFormatter,
    LogSettings,
)


class Log:
    """A logger of its own with our handler, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = CountingHandler(self.stream, clock=lambda: self.now)
        self.handler.setFormatter(LineFormatter(LogSettings("decode-0", "INFO", 1)))
        self.logger = logging.Logger("kvferry.test", logging.INFO)
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.handler.close()


def test_a_line_has_time_level_endpoint_and_what_it_is_about(log: Log) -> None:
    with about("r-1"):
        in_room(17)
        log.logger.warning("room-failed code=%s", "deadline")
        log.logger.info("named room=%d", 18)
    log.logger.info("alone")
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    first, second, third = log.lines
    assert re.fullmatch(
        f"{time} WARNING decode-0/1 room-failed code=deadline room=17 request=r-1", first
    )
    assert second.endswith(" INFO decode-0/1 named room=18 request=r-1")
    assert third.endswith(" INFO decode-0/1 alone")


def test_what_somebody_sent_begins_no_line(log: Log) -> None:
    log.logger.info("client-left path=%s", "/a\n2026-01-01 ERROR decode-0/1 forged\x1b[2J\u2028b")
    (line,) = log.lines
    assert "forged" in line
    assert "\x1b" not in line


def test_the_same_line_is_counted_instead_of_written(log: Log) -> None:
    for _ in range(435_199 // 100):
        log.logger.error("socket.accept() out of system resource\nsocket: <socket fd=7>")
    assert len(log.lines) == SAME_LINES
    log.now = 10.0
    log.logger.info("another")
    told = f"repeated times={4351 - SAME_LINES} seconds=10"
    assert told in log.lines[SAME_LINES]
    assert "out of system resource" in log.lines[SAME_LINES]
    assert " ERROR " in log.lines[SAME_LINES]
    assert log.lines[-1].endswith("another")


def test_lines_that_differ_in_values_are_bounded_too(log: Log) -> None:
    for number in range(1000):
        log.logger.info("bad-request reason=%d", number)
    log.logger.info("another")
    assert len(log.lines) == ALIKE_LINES + 1
    log.handler.close()
    assert "repeated times=800 seconds=10 line='bad-request reason=%d'" in log.lines[-1]


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "a\nb", "é", 'a"b'])
def test_an_id_that_cannot_be_used_is_replaced(given: str | None) -> None:
    assert re.fullmatch("[0-9a-f]{16}", request_id(given))


def test_an_id_is_passed_on_in_headers() -> None:
    assert onward() == {}
    with about(request_id("req_1/a=b:c")):
        assert onward() == {REQUEST_HEADER: "req_1/a=b:c"}
    assert onward() == {}
