"""Silent peers that still run keep their links; stopped peers lose them.

A process may get no GIL for seconds because a thread of its engine holds it, or no CPU time
because other processes spin. Its links must survive that.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from endpoint.fleets import eventually

import kvferry
from kvferry import Done, EndpointConfig, Failure, FailureCode, Layout, ProtocolConfig, attention
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.endpoint.control.sockets import ControlClient, ControlServer
from kvferry.endpoint.control.unix import RUNNING, UnixListener, UnixServer, connect, process_state

SILENCE_S = 2.0
QUICK = ProtocolConfig(heartbeat_s=0.2, silence_s=SILENCE_S, unresponsive_s=30.0)
CONFIG = EndpointConfig(protocol=QUICK)
LAYOUT = Layout(attention(layers=2, kv_heads=2, head_dim=8), page_tokens=4)
WAIT_S = 20.0


def hold_the_gil(seconds: float) -> None:
    """Keep all other threads of this process from running Python."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@contextmanager
def child(work: Callable[..., None], *args: object) -> Iterator[tuple[Connection, BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join()


def described(name: str, url: str) -> dict[str, Any]:
    """Return the arguments of an endpoint."""
    transport = kvferry.make_transport("shm")
    shape = (2, 2, 8, 4, 2, 8)
    kv = transport.allocate(2 * math.prod(shape)).view(np.uint16).reshape(shape)
    pools = {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}
    what = {"layout": LAYOUT, "pools": pools, "name": name, "model": "m"}
    return what | {"transport": transport, "discovery": url, "config": CONFIG}


def prefill(pipe: Connection, url: str) -> None:
    """Serve one room after another; hold the GIL for a given time before each push."""
    with kvferry.SourceEndpoint(**described("p", url)) as source:
        while room := pipe.recv():
            out = source.open(room)
            pipe.send("open")
            hold_the_gil(pipe.recv())
            out.push((0, 8), [0, 1])
            out.close()
            out.wait(WAIT_S)


@contextmanager
def linked_pair() -> Iterator[tuple[Connection, BaseProcess, kvferry.TargetEndpoint]]:
    """A prefill process and a target that have carried one room already."""
    with DiscoveryServer() as server, child(prefill, server.url) as (pipe, process):
        pipe.send("warm")
        assert pipe.recv() == "open"
        pipe.send(0.0)
        with kvferry.TargetEndpoint(**described("d", server.url)) as target:
            warm = target.receive("warm", prefill="p", tokens=8, pages=[0, 1])
            assert isinstance(warm.wait(WAIT_S), Done)
            yield pipe, process, target


def test_a_room_survives_a_source_without_the_gil() -> None:
    with linked_pair() as (pipe, _, target):
        pipe.send("starved")
        assert pipe.recv() == "open"
        into = target.receive("starved", prefill="p", tokens=8, pages=[2, 3])
        pipe.send(3 * SILENCE_S)
        assert isinstance(into.wait(WAIT_S), Done)


def test_a_stopped_source_is_noticed_in_time() -> None:
    with linked_pair() as (_, process, target):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        into = target.receive("stopped", prefill="p", tokens=8, pages=[2, 3])
        failure = into.wait(WAIT_S)
        assert isinstance(failure, Failure)
        assert failure.code is FailureCode.PEER_SILENT
        assert time.monotonic() - stopped < 3 * SILENCE_S


# ---------------------------------------------------------------- signs that a process runs


def serve_control(pipe: Connection) -> None:
    """Serve a control channel, then hold the GIL: only ZeroMQ's threads still answer."""
    server = ControlServer("127.0.0.1", silence_s=SILENCE_S)
    pipe.send(server.address)
    while not pipe.poll(0.01):
        # Python code authenticates new connections (ZAP).
        server.receive()
    hold_the_gil(60.0)


def test_a_connection_survives_without_the_gil_and_ends_when_the_process_is_stopped() -> None:
    with child(serve_control) as (pipe, process):
        client = ControlClient(pipe.recv(), silence_s=SILENCE_S)

        def is_open() -> bool:
            client.receive()
            return client.num_open > 0

        eventually(is_open)
        pipe.send(None)
        end = time.monotonic() + 2 * SILENCE_S
        while time.monotonic() < end:
            assert is_open()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        eventually(lambda: not is_open())
        assert time.monotonic() - stopped < client.lag_s + 1.0
        client.close()


def test_sending_to_a_closed_connection_fails() -> None:
    """A source learns by sending that a target's connection is closed."""
    server = ControlServer("127.0.0.1")
    client = ControlClient(server.address)
    client.send(b"hello")
    found: list[tuple[bytes, bytes]] = []

    def heard() -> bool:
        found.extend(server.receive())
        return bool(found)

    eventually(heard)
    ((route, _),) = found
    assert server.send(route, b"frame")
    client.close(0)
    eventually(lambda: not server.send(route, b"frame"))
    server.close()


def sleep_in(pipe: Connection, listener: UnixListener) -> None:
    channel = connect(listener)
    pipe.send(channel is not None)
    hold_the_gil(60.0)


def test_a_unix_channel_reports_whether_its_peer_runs() -> None:
    server = UnixServer.open()
    assert server is not None
    with child(sleep_in, server.listener) as (pipe, process):
        assert pipe.recv()
        (channel,) = server.accept()
        eventually(lambda: channel.peer_runs)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda: not channel.peer_runs)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: channel.peer_runs)
        process.kill()
        process.join()
        eventually(lambda: not channel.peer_runs)
        channel.close()
    server.close()


def test_the_state_of_a_process() -> None:
    assert process_state(os.getpid()) in RUNNING
    assert process_state(1 << 30) == ""
