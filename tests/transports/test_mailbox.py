"""The mailbox: order, and waits that always end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from kvferry.transports.mailbox import Mailbox

END_S = 60.0


def jumping(*times: float) -> Callable[[], float]:
    """A clock with these readings, as for a thread that lost its core between two of them."""
    left = iter(times)
    return lambda: next(left)


def ends(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(END_S)
    return not thread.is_alive()


@pytest.mark.parametrize("late_s", [0.5, 1.0, 2.0, 3600.0])
def test_a_wait_ends_if_its_time_has_passed_before_it_begins(late_s: float) -> None:
    # A lock takes a timeout of -1 for none.
    mailbox: Mailbox[int] = Mailbox(jumping(0.0, 1.0 + late_s))
    with pytest.raises(queue.Empty):
        mailbox.get(1.0)


def test_many_short_waits_end() -> None:
    """``queue.SimpleQueue`` hangs after some thousand calls before Python 3.13."""

    def wait_often() -> None:
        for _ in range(30_000):
            assert Mailbox[int]().drain(1e-5) == []

    assert ends(wait_often)


def test_two_threads_exchange_items() -> None:
    there, back = Mailbox[int](), Mailbox[int]()

    def echo() -> None:
        for _ in range(2000):
            back.put(there.get(END_S))

    threading.Thread(target=echo, daemon=True).start()
    for number in range(2000):
        there.put(number)
        assert back.get(END_S) == number


def test_many_producers_lose_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox()
    got: list[int] = []

    def put(first: int) -> None:
        for number in range(first, first + 1000):
            mailbox.put(number)

    def take() -> None:
        while len(got) < 4000:
            got.extend(mailbox.drain())

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    producers = [threading.Thread(target=put, args=(1000 * n,)) for n in range(4)]
    for producer in producers:
        producer.start()
    taker.join(END_S)
    assert sorted(got) == list(range(4000))
    for first in range(4):
        its = [number for number in got if number // 1000 == first]
        assert its == sorted(its)
    assert len(mailbox) == 0


def test_drain_returns_what_is_there() -> None:
    mailbox: Mailbox[str] = Mailbox()
    for word in ("a", "b", "c"):
        mailbox.put(word)
    assert mailbox.drain() == ["a", "b", "c"]
    assert mailbox.drain(0) == []
    with pytest.raises(queue.Empty):
        mailbox.get_now()
