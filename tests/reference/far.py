"""A cluster of which one prefill worker is in name spaces of its own: run as ``-m reference.far``.

The process has a network and mounts of its own, so that it changes nothing of the machine. It runs
the discovery service, the decode worker and one prefill worker. The other prefill worker has
another network, joined by a virtual cable, other file systems with another ``/dev/shm``, and
another IPC name space. The process sends prompts through both at the same time, and prints the
answers and their transports as one JSON document.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from reference.clusters import wait_until
from reference.driving import PROMPTS
from reference.working import (
    PATIENCE_S,
    PRELOAD,
    Caller,
    Worker,
    apart,
    body_of,
    call,
    hosted,
    options_for,
)
from reference.working import worker_main as run_worker

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Parallel
from kvferry.reference.options import InstanceOptions
from kvferry.security.keys import ClusterKey

# Print the stacks before the test gives up.
STUCK_S = 150.0
# For a worker to end, with its transports; then its stacks are printed.
END_S = 30.0
NEAR, FAR = "10.201.0.1", "10.201.0.2"
# Mount, IPC and network: CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWNET.
SPACES = 0x00020000 | 0x08000000 | 0x40000000
# UCX would also try devices of the other side that have the same addresses as this side's.
UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "far"}


def shell(words: str) -> None:
    subprocess.run(words.split(), check=True)


def see_own_devices() -> None:
    """Mount ``/sys`` anew: UCX finds devices there, and it shows those of the mounting process."""
    shell("mount -t sysfs sysfs /sys")


def wait_for(device: str) -> None:
    """Wait until a device is up. UCX ignores it before, and the kernel reports it a little late."""
    state = Path(f"/sys/class/net/{device}/operstate")
    wait_until(lambda: state.read_text().strip() == "up", f"{device} to be up")


def far_main(pipe: Connection) -> None:
    """Run the worker that shares memory with no other."""
    faulthandler.register(signal.SIGUSR1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(SPACES):
        pipe.send(("failed", os.strerror(ctypes.get_errno())))
        return
    shell("mount --make-rprivate /")
    shell("mount -t tmpfs tmpfs /dev/shm")
    see_own_devices()
    pipe.send(("apart", ""))
    pipe.recv()
    shell("ip link set lo up")
    shell(f"ip addr add {FAR}/30 dev far")
    shell("ip link set far up")
    wait_for("far")
    pipe.send(("joined", ""))
    os.environ.update(UCX)
    logging.basicConfig(level=logging.INFO)
    run_worker(pipe.recv(), pipe)


class FarWorker:
    """A process in its own name spaces that runs a worker. Stop it, also if a step fails."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=far_main, args=(theirs,))
        self._process.start()
        theirs.close()

    def join_networks(self) -> None:
        """Lay the cable between the process and this one."""
        self._heard("apart")
        shell(f"ip link add name near type veth peer name far netns {self._process.pid}")
        shell(f"ip addr add {NEAR}/30 dev near")
        shell("ip link set near up")
        self._pipe.send(None)
        self._heard("joined")
        wait_for("near")

    def start(self, options: InstanceOptions) -> None:
        self._pipe.send(options)

    def ready(self, name: str) -> Worker:
        return Worker(name, self._heard("ready"))

    def _heard(self, word: str) -> str:
        assert self._pipe.poll(PATIENCE_S), "the far worker is silent"
        said, text = self._pipe.recv()
        assert said == word, text
        return str(text)

    def stop(self) -> None:
        """End the process. Raises ``AssertionError`` if it does not end by itself. Idempotent."""
        self._process.terminate()
        self._process.join(END_S)
        if self._process.is_alive():
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            self._process.join(1.0)
            self._process.kill()
            self._process.join()
            raise AssertionError("the far worker did not end; its stacks are above")


async def conversation(caller: Caller, prefills: list[Worker], decode: Worker) -> dict[str, object]:
    """Every prompt through both prefill workers, all at once."""
    asked = [
        caller.pair(prefill, decode, 100 * i + j, body_of((i, *prompt)))
        for i, prefill in enumerate(prefills)
        for j, prompt in enumerate(PROMPTS)
    ]
    replies = [second for _, second in await asyncio.gather(*asked)]
    workers = [*prefills, decode]
    told = [await caller.idle(worker.url) for worker in workers]
    return {
        "sources": [reply.told.get("source") for reply in replies],
        "tokens": [reply.tokens for reply in replies],
        "links": {worker.name: one["links"] for worker, one in zip(workers, told, strict=True)},
    }


def main(folder: str, key_file: str) -> None:
    """Start all, ask, print, stop."""
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    see_own_devices()
    shell("ip link set lo up")
    os.environ["UCX_NET_DEVICES"] = "near"
    logging.basicConfig(level=logging.INFO)
    key = ClusterKey.new()
    key.write(key_file)
    with ExitStack() as undo:
        apart_from_us = FarWorker()
        undo.callback(apart_from_us.stop)
        apart_from_us.join_networks()
        server = undo.enter_context(DiscoveryServer(NEAR, 0, key))

        def options(role: str, name: str, host: str) -> InstanceOptions:
            where = role, Path(folder), server.url, Parallel()
            return options_for(*where, name=name, host=host, key_file=key_file, transport="auto")

        apart_from_us.start(options("prefill", "far", FAR))
        (near,) = undo.enter_context(apart(options("prefill", "near", NEAR)))
        (decode,) = undo.enter_context(hosted(options("decode", "decode", NEAR)))
        prefills = [near, apart_from_us.ready("far")]
        document = call(lambda caller: conversation(caller, prefills, decode), key)
        apart_from_us.stop()
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
