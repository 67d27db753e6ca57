"""Whether a process is over is claimed only where it can be proved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from msgspec import json
from msgspec.structs import replace

from kvferry.transport import lives
from kvferry.transport.lives import Life

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

OTHER = """
import msgspec, sys, threading
from kvferry.transport import lives
if "threads" in sys.argv:
    threading.Thread(target=sys.stdin.read).start()
print(msgspec.json.encode(lives.own()).decode())
sys.stdout.flush()
sys.stdin.read()
"""


class Other:
    """A process that waits to be ended."""

    def __init__(self, *words: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", OTHER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.popen.stdout is not None
        self.life = json.decode(self.popen.stdout.readline(), type=Life)

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=10)


@pytest.fixture(params=[(), ("threads",)], ids=["one thread", "two threads"])
def other(request: pytest.FixtureRequest) -> Iterator[Other]:
    made = Other(*request.param)
    yield made
    made.end()


def test_the_living_are_not_over(other: Other) -> None:
    assert lives.is_over(lives.own()) is False
    assert lives.is_over(other.life) is False


def test_the_stopped_are_not_over(other: Other) -> None:
    os.kill(other.life.pid, signal.SIGSTOP)
    assert lives.is_over(other.life) is False


def test_the_killed_are_over_also_while_nobody_has_waited_for_them(other: Other) -> None:
    os.kill(other.life.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.life.pid, os.WEXITED | os.WNOWAIT)
    assert lives.is_over(other.life) is True
    other.popen.wait(10)
    assert lives.is_over(other.life) is True


def test_a_process_id_that_is_used_again_is_not_the_same_life() -> None:
    mine = lives.own()
    assert lives.is_over(replace(mine, start=mine.start - 1)) is True


@pytest.mark.parametrize("change", [{"boot": "another"}, {"boot": ""}, {"space": 7}])
def test_nothing_is_claimed_of_those_who_can_not_be_seen(change: dict[str, object]) -> None:
    assert lives.is_over(replace(lives.own(), **change)) is None


def test_a_thread_that_has_ended_is_not_the_process() -> None:
    """Threads come and go while the process is looked at."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            threading.Thread(target=int).start()

    churner = threading.Thread(target=churn)
    churner.start()
    try:
        assert not any(lives.is_over(lives.own()) for _ in range(200))
    finally:
        stop.set()
        churner.join()
