"""A control channel across a network partition. Run it in a new network namespace.

The server runs in another network namespace, connected by virtual Ethernet. The partition is a
neighbour entry with a wrong hardware address, so that packets vanish without an error, as they do
when a switch fails. Prints after how many seconds from its end a frame arrived.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from kvferry.endpoint.control.sockets import ControlClient, ControlServer
from kvferry.security.keys import ClusterKey

NEAR, FAR = "10.201.1.1", "10.201.1.2"
NOBODY = "02:00:00:00:00:99"
CLONE_NEWNET = 0x40000000
PATIENCE_S = 60.0


def shell(words: str) -> None:
    subprocess.run(words.split(), check=True)


def serve(pipe: Connection, key: ClusterKey) -> None:
    """Serve the far end: report when each frame arrives."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace")
    pipe.send("apart")
    pipe.recv()
    shell("ip link set lo up")
    shell(f"ip addr add {FAR}/30 dev far")
    shell("ip link set far up")
    server = ControlServer(FAR, 0, key)
    pipe.send(server.address)
    while not pipe.poll(0.01):
        for _, frame in server.receive():
            pipe.send((time.monotonic(), frame))


def wait_for(holds: Callable[[], object], client: ControlClient) -> None:
    """Send a frame every 0.2 s, like the protocol's repetitions, until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "no frame came through"
        client.send(b"frame")
        client.receive()
        time.sleep(0.2)


def main(partition_s: float) -> None:
    """Send frames, cut the network for a while, and measure."""
    key = ClusterKey.new()
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    far = context.Process(target=serve, args=(theirs, key))
    far.start()
    pipe.recv()
    shell(f"ip link add name near type veth peer name far netns {far.pid}")
    shell(f"ip addr add {NEAR}/30 dev near")
    shell("ip link set near up")
    pipe.send(None)
    client = ControlClient(pipe.recv(), key)
    wait_for(pipe.poll, client)
    shell(f"ip neigh replace {FAR} lladdr {NOBODY} dev near nud permanent")
    end = time.monotonic() + partition_s
    wait_for(lambda: time.monotonic() >= end, client)
    while pipe.poll():
        pipe.recv()
    shell(f"ip neigh del {FAR} dev near")
    healed = time.monotonic()
    wait_for(pipe.poll, client)
    print(pipe.recv()[0] - healed)
    pipe.send(None)
    far.join(5)
    client.close()


if __name__ == "__main__":
    assert os.geteuid() == 0
    main(float(sys.argv[1]))
