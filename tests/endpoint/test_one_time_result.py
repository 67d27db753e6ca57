"""What happens once is heard of by all who wait or listen, whenever they came."""

from __future__ import annotations

import logging
import threading

import pytest

from kvferry.endpoint.one_time_result import OneTimeResult

WAIT_S = 15.0


def test_whoever_listens_hears_of_it_in_order_and_later_ones_at_once() -> None:
    once: OneTimeResult[str] = OneTimeResult()
    heard: list[tuple[int, str]] = []
    once.add_callback(lambda value: heard.append((1, value)))
    once.add_callback(lambda value: heard.append((2, value)))
    assert once.value is None
    assert once.set("end")
    once.add_callback(lambda value: heard.append((3, value)))
    assert heard == [(1, "end"), (2, "end"), (3, "end")]


def test_only_the_first_counts() -> None:
    once: OneTimeResult[str] = OneTimeResult()
    heard: list[str] = []
    once.add_callback(heard.append)
    assert [once.set("one"), once.set("two")] == [True, False]
    assert (heard, once.value, once.wait(0)) == (["one"], "one", "one")


def test_all_who_wait_are_woken() -> None:
    once: OneTimeResult[str] = OneTimeResult()
    waiting, woken = threading.Barrier(4), []
    # Both kinds of wait.
    limits = (None, WAIT_S, WAIT_S)

    def wait(limit: float | None) -> None:
        waiting.wait(WAIT_S)
        woken.append(once.wait(limit))

    threads = [threading.Thread(target=wait, args=(limit,)) for limit in limits]
    for thread in threads:
        thread.start()
    waiting.wait(WAIT_S)
    once.set("end")
    for thread in threads:
        thread.join(WAIT_S)
    assert woken == ["end"] * 3


@pytest.mark.parametrize("limit", [-1.0, 0.0, 1e-4])
def test_a_wait_ends_in_time_and_leaves_nothing_behind(limit: float) -> None:
    once: OneTimeResult[str] = OneTimeResult()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            once.wait(limit)
    assert once._callbacks == []


def test_a_listeners_mistake_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    once: OneTimeResult[str] = OneTimeResult()
    heard: list[str] = []
    once.add_callback(lambda _: 1 / 0)
    once.add_callback(heard.append)
    with caplog.at_level(logging.ERROR):
        once.set("end")
        once.add_callback(lambda _: 1 / 0)
    assert heard == ["end"]
    assert caplog.text.count("callback-failed") == 2
