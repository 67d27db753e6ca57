"""The liveness port, probed for real processes that run, are stopped, killed and restarted."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.endpoint.liveness.port import (
    ANSWER,
    MAGIC,
    Address,
    Liveness,
    LivenessPort,
    judge,
    probe,
)
from kvferry.errors import InputError

SCRIPT = """
import select, sys
from kvferry.endpoint.liveness.port import LivenessPort
line = LivenessPort(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
print(line.address[1], flush=True)
while True:
    select.select([line], [], [])
    line.answer()
"""
ENOUGH_S = 10.0
SHORT_S = 0.3


class Process:
    """A process with a liveness port."""

    def __init__(self, incarnation: int, host: str = "127.0.0.1", port: int = 0) -> None:
        words = [sys.executable, "-c", SCRIPT, host, str(incarnation), str(port)]
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        self.address: Address = (host, int(self.child.stdout.readline()))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)

    def end(self) -> None:
        self.child.kill()
        self.child.wait(ENOUGH_S)
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(incarnation: int, host: str = "127.0.0.1", port: int = 0) -> Process:
        started.append(Process(incarnation, host, port))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def wait_stopped(pid: int) -> None:
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_process_is_alive_until_it_is_killed(start: Callable[..., Process], host: str) -> None:
    process = start(7, host)
    assert probe(process.address, 7, ENOUGH_S) is Liveness.ALIVE
    process.signal(signal.SIGKILL)
    process.child.wait(ENOUGH_S)
    assert probe(process.address, 7, ENOUGH_S) is Liveness.GONE


def test_a_stopped_process_is_not_gone(start: Callable[..., Process]) -> None:
    process = start(7)
    process.signal(signal.SIGSTOP)
    wait_stopped(process.child.pid)
    for _ in range(3):
        assert probe(process.address, 7, SHORT_S) is Liveness.UNKNOWN
    process.signal(signal.SIGCONT)
    assert probe(process.address, 7, ENOUGH_S) is Liveness.ALIVE
    process.signal(signal.SIGSTOP)
    process.signal(signal.SIGKILL)
    process.child.wait(ENOUGH_S)
    assert probe(process.address, 7, ENOUGH_S) is Liveness.GONE


def test_another_incarnation_on_the_port_proves_the_first_dead(
    start: Callable[..., Process],
) -> None:
    first = start(7)
    first.end()
    second = start(8, port=first.address[1])
    assert probe(first.address, 7, ENOUGH_S) is Liveness.GONE
    assert probe(second.address, 8, ENOUGH_S) is Liveness.ALIVE


def test_two_live_processes_never_share_a_port(start: Callable[..., Process]) -> None:
    process = start(7)
    with pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1 port"):
        LivenessPort("127.0.0.1", 8, process.address[1])


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", MAGIC, ANSWER.pack(MAGIC, 8) + b"x"]
)
def test_an_unknown_answer_proves_nothing(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            asker, _ = stranger.accept()
            with asker:
                asker.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        assert probe(stranger.getsockname(), 7, ENOUGH_S) is Liveness.UNKNOWN
        thread.join(ENOUGH_S)


def test_a_slow_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stop = threading.Event()

        def drip() -> None:
            asker, _ = stranger.accept()
            with asker:
                while not stop.wait(0.05):
                    asker.sendall(b"k")

        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        assert probe(stranger.getsockname(), 7, SHORT_S) is Liveness.UNKNOWN
        assert time.monotonic() - begun < ENOUGH_S / 2
        stop.set()
        thread.join(ENOUGH_S)


@pytest.mark.parametrize(
    "address",
    [("localhost", 9), ("", 9), ("999.1.1.1", 9), ("127.0.0.1", 70000), ("127.0.0.1", -1)],
)
def test_an_invalid_address_proves_nothing(address: Address) -> None:
    assert probe(address, 7, SHORT_S) is Liveness.UNKNOWN


def test_probes_that_hang_up_do_no_harm() -> None:
    line = LivenessPort("127.0.0.1", 7)
    askers = [socket.create_connection(line.address) for _ in range(20)]
    for asker in askers[::2]:
        asker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asker.close()
    answered = 0
    deadline = time.monotonic() + ENOUGH_S
    while answered < 10 and time.monotonic() < deadline:
        ready, _, _ = select.select([line], [], [], 0.01)
        if ready:
            line.answer()
        answered = sum(bool(select.select([asker], [], [], 0)[0]) for asker in askers[1::2])
    for asker in askers[1::2]:
        assert asker.recv(99) == ANSWER.pack(MAGIC, 7)
        asker.close()
    line.answer()
    line.close()
    assert probe(line.address, 7, ENOUGH_S) is Liveness.GONE


def test_a_liveness_port_needs_a_numeric_address() -> None:
    with pytest.raises(InputError, match="numeric address"):
        LivenessPort("localhost", 7)
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1"):
        LivenessPort("192.0.2.1", 7)
    with pytest.raises(InputError, match="cannot listen"):
        LivenessPort("127.0.0.1", 7, 70000)


@given(st.binary(max_size=40), st.integers(0, (1 << 63) - 1))
def test_only_a_complete_answer_is_proof(answer: bytes, incarnation: int) -> None:
    whole = len(answer) == ANSWER.size and answer.startswith(MAGIC)
    assert (judge(answer, incarnation) is Liveness.UNKNOWN) == (not whole)
    assert judge(ANSWER.pack(MAGIC, incarnation), incarnation) is Liveness.ALIVE
    assert judge(ANSWER.pack(MAGIC, incarnation ^ 1), incarnation) is Liveness.GONE
