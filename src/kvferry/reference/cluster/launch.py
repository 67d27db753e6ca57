"""A whole cluster on this machine: starts its processes, watches them, ends them.

Children live no longer than this process, however it ends: each watches a pipe
that only we hold (``launched``). One that dies while we run is started again.
Belongs to one thread.
"""

from __future__ import annotations

import http.client
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from kvferry import InputError, KvferryError, resolve_ip
from kvferry.http.listening import bind_socket
from kvferry.reference.cluster.child import ChildOrder, Said
from kvferry.reference.cluster.description import (
    ClusterDescription,
    ModelFolder,
    discovery_options,
    router_options,
    worker_options,
)
from kvferry.reference.cluster.parts import STOPPING, PartKind

log = logging.getLogger("kvferry.launch")

# A large model takes its time. A child that ends is noticed at once.
START_S = 900.0
ROUTED_S = 60.0
STOP_S = 20.0
LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
# One that ran for so long is not in a loop of failures.
STEADY_S = 60.0
ROUTER = "router"
DISCOVERY = "discovery"


class PartFailed(KvferryError):
    """A part of the cluster could not start; the message says which and why."""


@dataclass(eq=False, slots=True)
class ChildProcess:
    """One part. ``url`` is there once it is ready, ``restart_at`` while it is to be restarted."""

    order: ChildOrder
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    started_at: float = 0.0
    restart_at: float | None = None
    pause_s: float = LEAST_PAUSE_S
    _heard: bytearray = field(default_factory=bytearray)

    @property
    def name(self) -> str:
        """As the user knows it."""
        return self.order.name

    def start(self, stderr: IO[bytes] | int | None) -> None:
        """Begin its life, with the order as the first line."""
        self.url, self.restart_at, self.started_at = "", None, time.monotonic()
        self._heard.clear()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.reference.cluster.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            # Ctrl-C in a terminal goes to its foreground group, which is ours alone.
            process_group=0,
        )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(self.order) + b"\n")
        except BrokenPipeError:
            log.info("ended-at-once name=%s", self.name)

    @property
    def output(self) -> int:
        """What to wait on for news of it."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def hear(self) -> Said | None:
        """What it has said; None if it has ended. Call when its output is readable."""
        data = os.read(self.output, 1 << 16)
        if not data:
            return None
        self._heard += data
        line, newline, _ = bytes(self._heard).partition(b"\n")
        if not newline:
            return Said()
        self._heard.clear()
        return msgspec.json.decode(line, type=Said)

    def tell_to_stop(self) -> None:
        """Close its lifeline."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self, deadline: float) -> int:
        """Its exit status; it is killed if it does not end by itself."""
        assert self.process is not None
        self.tell_to_stop()
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("killed name=%s", self.name)
            self.process.kill()
            return self.process.wait()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


class ClusterLaunch:
    """The processes of one cluster. Leaving the block ends them all."""

    def __init__(self, *, log_level: str = "WARNING", stderr: IO[bytes] | None = None) -> None:
        self.children: list[ChildProcess] = []
        self._log_level = log_level
        self._stderr = stderr

    def __enter__(self) -> ClusterLaunch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __getitem__(self, name: str) -> ChildProcess:
        return next(child for child in self.children if child.name == name)

    # ------------------------------------------------------------ beginning

    def start_all(
        self, cluster: ClusterDescription, model: ModelFolder, ready: Callable[[str, str], None]
    ) -> str:
        """Start every part and wait until requests can be answered; the router's address.

        ``ready`` is called with the name and the address of each part.
        """
        demand_ports(cluster)
        told = self.start(DISCOVERY, PartKind.DISCOVERY, discovery_options(cluster))
        self.wait_ready([told], ready)
        # Pinned: the others would not find it elsewhere after a restart.
        self._pin_port(told)
        workers = cluster.workers()
        router = self.start(ROUTER, PartKind.ROUTER, router_options(cluster, told.url))
        started = [
            self.start(
                worker.name, PartKind.WORKER, worker_options(cluster, worker, model, told.url)
            )
            for worker in workers
        ]
        self.wait_ready([router, *started], ready)
        self._pin_port(router)
        wait_until_routed(router.url, {worker.name for worker in workers})
        return router.url

    def start(self, name: str, kind: PartKind, options: dict[str, Any]) -> ChildProcess:
        """Start one part, without waiting for it."""
        order = ChildOrder(name=name, kind=kind, options=options, log_level=self._log_level)
        child = ChildProcess(order)
        self.children.append(child)
        child.start(self._stderr)
        return child

    @staticmethod
    def _pin_port(child: ChildProcess) -> None:
        port = urlsplit(child.url).port
        options = child.order.options | {"port": port}
        child.order = msgspec.structs.replace(child.order, options=options)

    def wait_ready(
        self, children: Iterable[ChildProcess], ready: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """Wait until all are ready, or raise what the first that fails has said."""
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.output, selectors.EVENT_READ, child)
            while selector.get_map():
                keys = selector.select(max(0.0, deadline - time.monotonic()))
                if not keys:
                    raise PartFailed(f"not every part was ready within {START_S:g} s; see the log")
                for key, _ in keys:
                    if _is_ready(key.data):
                        selector.unregister(key.fileobj)
                        ready(key.data.name, key.data.url)

    # ------------------------------------------------------------ the long middle

    def supervise(self, told: socket.socket) -> None:
        """Restart whoever ends, until a signal is readable from the socket."""
        with selectors.DefaultSelector() as selector:
            selector.register(told, selectors.EVENT_READ, None)
            for child in self.children:
                selector.register(child.output, selectors.EVENT_READ, child)
            while True:
                for key, _ in selector.select(self._restart_due()):
                    if key.data is None:
                        if told.recv(1)[0] in STOPPING:
                            return
                    elif not self._took_news(key.data):
                        selector.unregister(key.fileobj)
                        self._ended(key.data)
                for child in self._due():
                    child.start(self._stderr)
                    selector.register(child.output, selectors.EVENT_READ, child)

    def _restart_due(self) -> float | None:
        times = [child.restart_at for child in self.children if child.restart_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _due(self) -> list[ChildProcess]:
        now = time.monotonic()
        return [child for child in self.children if child.restart_at and child.restart_at <= now]

    @staticmethod
    def _took_news(child: ChildProcess) -> bool:
        said = child.hear()
        if said is None:
            return False
        if said.url:
            child.url = said.url
            log.warning("ready-again name=%s url=%s", child.name, child.url)
        if said.error:
            log.warning("failed name=%s error=%r", child.name, said.error)
        return True

    @staticmethod
    def _ended(child: ChildProcess) -> None:
        status = child.wait(time.monotonic() + STOP_S)
        now = time.monotonic()
        steady = now - child.started_at > STEADY_S
        child.pause_s = LEAST_PAUSE_S if steady else child.pause_s
        child.restart_at = now + child.pause_s
        log.warning("ended name=%s status=%d restart_s=%.0f", child.name, status, child.pause_s)
        child.pause_s = min(2 * child.pause_s, MOST_PAUSE_S)

    # ------------------------------------------------------------ end

    def stop(self) -> None:
        """End the router, then the workers, then discovery, in bounded time. Idempotent."""
        waves: Sequence[tuple[PartKind, ...]] = (
            (PartKind.ROUTER,),
            (PartKind.WORKER,),
            (PartKind.DISCOVERY,),
        )
        for kinds in waves:
            running = [
                child
                for child in self.children
                if child.order.kind in kinds and child.process is not None
            ]
            for child in running:
                child.tell_to_stop()
            deadline = time.monotonic() + STOP_S
            for child in running:
                child.wait(deadline)
        self.children = []


def demand_ports(cluster: ClusterDescription) -> None:
    """Refuse a port that is in use before anything starts; its part would say so much later."""
    listening = [(DISCOVERY, cluster.discovery.host, cluster.discovery.port)]
    listening += [(ROUTER, cluster.router.host, cluster.router.port)]
    listening += [(one.name, one.section.host, one.section.port) for one in cluster.workers()]
    for name, host, port in listening:
        try:
            bind_socket(resolve_ip(host), port).close()
        except InputError as error:
            raise InputError(f"{name}: {error}") from None


def _is_ready(child: ChildProcess) -> bool:
    said = child.hear()
    if said is None:
        status = child.wait(time.monotonic() + STOP_S)
        raise PartFailed(
            f"{child.name} ended with status {status} before it was ready; see its log"
        )
    if said.error:
        kind = InputError if said.is_input else PartFailed
        raise kind(f"{child.name}: {said.error}")
    child.url = said.url
    return bool(said.url)


def wait_until_routed(url: str, names: set[str], timeout_s: float = ROUTED_S) -> None:
    """Wait until a router has found these workers and all are up."""
    deadline = time.monotonic() + timeout_s
    while True:
        missing = names - _up_at(url)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise PartFailed(f"the router has not found {', '.join(sorted(missing))}; see its log")
        time.sleep(0.05)


def _up_at(url: str) -> set[str]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
    try:
        connection.request("GET", "/healthz")
        document = msgspec.json.decode(connection.getresponse().read())
        return {worker["name"] for worker in document["workers"] if worker["up"]}
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return set()
    finally:
        connection.close()
