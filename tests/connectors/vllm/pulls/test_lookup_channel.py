"""Look-ups from the lead rank's process."""

from __future__ import annotations

import socket
import threading

import pytest

from kvferry import Peer, PrefixQuery, Room
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


def test_a_question_whose_time_is_over_is_not_answered() -> None:
    taken: list[Room] = []

    def wake() -> None:
        """Step when the second question comes, which is served after the first."""
        if len(server) == 2:
            pending = server.take()
            assert pending is not None
            taken.append(pending.question.room)
            pending.held.set_result(48)

    server, client = LookupServer(wake), LookupClient()
    client.address = server.address
    assert client.holds(query("first", deadline_s=0.05)) == 0
    assert client.holds(query("second")) == 48
    assert taken == ["second"]


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
