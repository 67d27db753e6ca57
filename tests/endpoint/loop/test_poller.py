"""The poller: short waits, and ZeroMQ sockets whose file descriptor gives no signal."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import pytest
import zmq
from endpoint.fleets import eventually

from kvferry.endpoint.control.sockets import has_message
from kvferry.endpoint.loop.inbox import Inbox
from kvferry.endpoint.loop.poller import Poller


def test_a_short_wait_is_not_rounded_up_to_a_millisecond() -> None:
    inbox, context = Inbox(), zmq.Context()
    listening = context.socket(zmq.PULL)
    poller = Poller()
    poller.watch(inbox.fileno())
    poller.watch(listening)
    seconds = []
    for _ in range(200):
        begin = time.perf_counter()
        assert poller.wait(200e-6) == set()
        seconds.append(time.perf_counter() - begin)
    # The shortest of many: other load on the machine only adds time.
    assert 150e-6 < min(seconds) < 900e-6
    context.destroy(0)
    inbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_short_waits_stay_short_with_more_descriptors_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    poller, pipes = Poller(), [os.pipe() for _ in range(600)]
    try:
        for reading, _ in pipes:
            poller.watch(reading)
        seconds = []
        for _ in range(100):
            begin = time.perf_counter()
            assert poller.wait(200e-6) == set()
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 900e-6
        os.write(pipes[-1][1], b"a")
        assert poller.wait(5.0) == {pipes[-1][0]}
    finally:
        for pipe in pipes:
            for fd in pipe:
                os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("timeout_s", [5e-4, 5.0])
def test_any_readable_source_ends_a_wait(timeout_s: float) -> None:
    inbox, context = Inbox(), zmq.Context()
    listening, saying = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    saying.connect(f"tcp://127.0.0.1:{listening.bind_to_random_port('tcp://127.0.0.1')}")
    poller = Poller()
    poller.watch(inbox.fileno())
    poller.watch(listening)
    saying.send(b"a")
    saying.send(b"b")
    eventually(lambda: poller.wait(timeout_s) == {listening})
    listening.recv()
    # The second message gave no signal.
    eventually(lambda: poller.wait(timeout_s) == {listening})
    listening.recv()
    inbox.put("news")
    assert poller.wait(timeout_s) == {inbox.fileno()}
    poller.unwatch(listening)
    context.destroy(0)
    inbox.close()


def test_a_message_without_a_signal_is_found_before_a_wait() -> None:
    """Any call on a ZeroMQ socket may consume the signal of a message."""
    context: Any = zmq.Context()
    listening, saying = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    saying.connect(f"tcp://127.0.0.1:{listening.bind_to_random_port('tcp://127.0.0.1')}")
    poller = Poller()
    poller.watch(listening)
    assert poller.wait(0.0) == set()
    saying.send(b"a")
    eventually(lambda: has_message(listening))
    poller.mark_used(listening)
    assert poller.wait(5.0) == {listening}
    # The message was not received, so it is still there.
    assert poller.wait(5.0) == {listening}
    listening.recv()
    assert poller.wait(0.0) == set()
    poller.unwatch(listening)
    context.destroy(0)
