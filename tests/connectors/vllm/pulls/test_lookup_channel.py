"""Look-ups from the lead rank's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from kvferry import Peer, PrefixQuery
from kvferry.connectors.vllm.pulls.lookup_channel import LookupClient, LookupServer

WAIT_S = 20.0


def query(room: int | str = 7, deadline_s: float = WAIT_S) -> PrefixQuery:
    return PrefixQuery(
        room=room, peer=Peer("p", 0), chain=b"12345678", tokens=16, prefix=0, deadline_s=deadline_s
    )


def answering(tokens: int) -> tuple[LookupServer, LookupClient, list[threading.Thread]]:
    """Return a server whose thread of steps begins when it is woken, and a client."""
    steps: list[threading.Thread] = []

    def step() -> None:
        pending = server.take()
        assert pending is not None
        assert (pending.question.chain, pending.question.prefix) == (b"12345678", 0)
        pending.held.set_result(tokens)

    def wake() -> None:
        steps.append(threading.Thread(target=step))
        steps[-1].start()

    server, client = LookupServer(wake), LookupClient()
    client.address = server.address
    return server, client, steps


def test_the_step_after_a_wake_up_answers() -> None:
    server, client, steps = answering(48)
    assert [client.holds(query(room)) for room in (1, "two")] == [48, 48]
    assert len(steps) == 2
    assert not server


def test_before_the_first_step_nothing_is_held() -> None:
    assert LookupClient().holds(query()) == 0


def test_an_answer_that_comes_too_late_is_not_taken() -> None:
    woken = threading.Event()
    server, client = LookupServer(woken.set), LookupClient()
    client.address = server.address
    assert client.holds(query(deadline_s=0.05)) == 0
    assert woken.wait(WAIT_S)
    eventually(lambda: server.take() is None)


def eventually(holds: Callable[[], bool]) -> None:
    waiter = threading.Event()
    for _ in range(1000):
        if holds():
            return
        waiter.wait(0.01)
    raise AssertionError


def test_a_scheduler_that_is_gone_holds_nothing() -> None:
    client = LookupClient()
    client.address = "\0kvferry-nobody"
    assert client.holds(query()) == 0


@pytest.mark.parametrize("sent", [b"", b"\xff garbage", b"\x93\x01\x02"])
def test_a_malformed_question_is_refused_and_stops_nothing(sent: bytes) -> None:
    server, client, _ = answering(48)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(server.address)
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert client.holds(query()) == 48
