"""A one-time result reaches all waiters and callbacks, early and late ones."""

from __future__ import annotations

import logging
import threading

import pytest

from kvferry.endpoint.one_time_result import OneTimeResult

WAIT_S = 15.0


def test_callbacks_run_in_order_and_late_ones_at_once() -> None:
    result: OneTimeResult[str] = OneTimeResult()
    heard: list[tuple[int, str]] = []
    result.add_callback(lambda value: heard.append((1, value)))
    result.add_callback(lambda value: heard.append((2, value)))
    assert result.value is None
    assert result.set("end")
    result.add_callback(lambda value: heard.append((3, value)))
    assert heard == [(1, "end"), (2, "end"), (3, "end")]


def test_only_the_first_value_counts() -> None:
    result: OneTimeResult[str] = OneTimeResult()
    heard: list[str] = []
    result.add_callback(heard.append)
    assert [result.set("one"), result.set("two")] == [True, False]
    assert (heard, result.value, result.wait(0)) == (["one"], "one", "one")


def test_all_waiters_are_woken() -> None:
    result: OneTimeResult[str] = OneTimeResult()
    waiting, woken = threading.Barrier(4), []
    # Waits without and with a timeout.
    limits = (None, WAIT_S, WAIT_S)

    def wait(limit: float | None) -> None:
        waiting.wait(WAIT_S)
        woken.append(result.wait(limit))

    threads = [threading.Thread(target=wait, args=(limit,)) for limit in limits]
    for thread in threads:
        thread.start()
    waiting.wait(WAIT_S)
    result.set("end")
    for thread in threads:
        thread.join(WAIT_S)
    assert woken == ["end"] * 3


@pytest.mark.parametrize("limit", [-1.0, 0.0, 1e-4])
def test_a_wait_times_out_and_leaves_no_callback(limit: float) -> None:
    result: OneTimeResult[str] = OneTimeResult()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            result.wait(limit)
    assert result._callbacks == []


def test_an_exception_of_a_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    result: OneTimeResult[str] = OneTimeResult()
    heard: list[str] = []
    result.add_callback(lambda _: 1 / 0)
    result.add_callback(heard.append)
    with caplog.at_level(logging.ERROR):
        result.set("end")
        result.add_callback(lambda _: 1 / 0)
    assert heard == ["end"]
    assert caplog.text.count("callback-failed") == 2
