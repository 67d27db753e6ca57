"""A whole cluster on this machine: starts its processes, restarts those that end, ends them.

Children end with this process, however it ends: each watches a pipe that only this process
holds. Belongs to one thread.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from kvferry import InputError, KvferryError
from kvferry.reference.cluster.description import (
    ClusterDescription,
    ModelFolder,
    discovery_options,
    router_options,
    worker_options,
)
from kvferry.reference.cluster.process import STOPPING, ChildOrder, ChildReport, PartKind

log = logging.getLogger("kvferry.launch")

# Enough for a large model; a child that ends is noticed at once.
START_S = 900.0
ROUTED_S = 60.0
STOP_S = 20.0
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
# A child that ran for this long is not in a loop of failures.
STEADY_S = 60.0


class PartFailed(KvferryError):
    """A part of the cluster could not start; the message says which and why."""


@dataclass(eq=False, slots=True)
class ChildProcess:
    """One part. ``url`` is set once it is ready, ``restart_at`` while it waits for a restart."""

    order: ChildOrder
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    started_at: float = 0.0
    restart_at: float | None = None
    pause_s: float = MIN_PAUSE_S

    @property
    def name(self) -> str:
        """The part's name in the cluster."""
        return self.order.name

    def start(self, stderr: IO[bytes] | int | None) -> None:
        """Start the process and send its order."""
        self.url, self.restart_at, self.started_at = "", None, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.reference.cluster.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            # Ctrl-C in a terminal goes to its foreground group, which is the parent's alone.
            process_group=0,
        )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(self.order) + b"\n")
        except BrokenPipeError:
            log.info("ended-at-once name=%s", self.name)

    @property
    def output(self) -> int:
        """The file descriptor of its reports."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read_reports(self) -> list[ChildReport]:
        """Return its reports, when its output is readable; empty if it has ended."""
        # A report is written at once and is shorter than a pipe's atomic write.
        lines = os.read(self.output, 1 << 16).splitlines()
        return [msgspec.json.decode(line, type=ChildReport) for line in lines]

    def begin_stop(self) -> None:
        """Close its lifeline."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def wait(self, deadline: float) -> int:
        """Return its exit status; kill it at the deadline."""
        assert self.process is not None
        self.begin_stop()
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

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __getitem__(self, name: str) -> ChildProcess:
        return next(child for child in self.children if child.name == name)

    def start_all(
        self, cluster: ClusterDescription, model: ModelFolder, ready: Callable[[str, str], None]
    ) -> str:
        """Start every part; return the router's address once requests can be answered.

        ``ready`` is called with the name and the address of each part.
        """
        discovery = self.start("discovery", PartKind.DISCOVERY, discovery_options(cluster))
        self.wait_ready([discovery], ready)
        # The others would not find it at another port after a restart.
        self._pin_port(discovery)
        workers = cluster.workers()
        router = self.start("router", PartKind.ROUTER, router_options(cluster, discovery.url))
        started = [
            self.start(
                worker.name, PartKind.WORKER, worker_options(cluster, worker, model, discovery.url)
            )
            for worker in workers
        ]
        self.wait_ready([router, *started], ready)
        self._pin_port(router)
        wait_until_routed(router.url, {worker.name for worker in workers})
        return router.url

    def start(self, name: str, kind: PartKind, options: dict[str, Any]) -> ChildProcess:
        """Start one part without waiting for it."""
        order = ChildOrder(name=name, kind=kind, options=options, log_level=self._log_level)
        child = ChildProcess(order)
        self.children.append(child)
        child.start(self._stderr)
        return child

    @staticmethod
    def _pin_port(child: ChildProcess) -> None:
        options = child.order.options | {"port": urlsplit(child.url).port}
        child.order = msgspec.structs.replace(child.order, options=options)

    def wait_ready(
        self, children: Iterable[ChildProcess], ready: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        """Wait until all are ready, or raise the error of the first that fails."""
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.output, selectors.EVENT_READ, child)
            while selector.get_map():
                keys = selector.select(max(0.0, deadline - time.monotonic()))
                if not keys:
                    raise PartFailed(f"not every part was ready within {START_S:g} s; see the log")
                for key, _ in keys:
                    _demand_ready(key.data)
                    selector.unregister(key.fileobj)
                    ready(key.data.name, key.data.url)

    def supervise(self, signals: socket.socket) -> None:
        """Restart children that end, until a stop signal is readable from the socket."""
        with selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ, None)
            for child in self.children:
                selector.register(child.output, selectors.EVENT_READ, child)
            while True:
                for key, _ in selector.select(self._restart_due_s()):
                    if key.data is None:
                        if signals.recv(1)[0] in STOPPING:
                            return
                    elif not _is_running(key.data):
                        selector.unregister(key.fileobj)
                        _schedule_restart(key.data)
                now = time.monotonic()
                for child in self.children:
                    if child.restart_at is not None and child.restart_at <= now:
                        child.start(self._stderr)
                        selector.register(child.output, selectors.EVENT_READ, child)

    def _restart_due_s(self) -> float | None:
        times = [child.restart_at for child in self.children if child.restart_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def stop(self) -> None:
        """End the router, then the workers, then discovery, in bounded time. Idempotent."""
        for kind in (PartKind.ROUTER, PartKind.WORKER, PartKind.DISCOVERY):
            ending = [child for child in self.children if child.order.kind is kind]
            for child in ending:
                child.begin_stop()
            deadline = time.monotonic() + STOP_S
            for child in ending:
                child.wait(deadline)
        self.children = []


def _is_running(child: ChildProcess) -> bool:
    """Log a child's reports; return False if it has ended."""
    reports = child.read_reports()
    for report in reports:
        if report.url:
            child.url = report.url
            log.warning("ready-again name=%s url=%s", child.name, child.url)
        if report.error:
            log.warning("failed name=%s error=%r", child.name, report.error)
    return bool(reports)


def _schedule_restart(child: ChildProcess) -> None:
    status = child.wait(time.monotonic() + STOP_S)
    now = time.monotonic()
    if now - child.started_at > STEADY_S:
        child.pause_s = MIN_PAUSE_S
    child.restart_at = now + child.pause_s
    log.warning("ended name=%s status=%d restart_s=%.0f", child.name, status, child.pause_s)
    child.pause_s = min(2 * child.pause_s, MAX_PAUSE_S)


def _demand_ready(child: ChildProcess) -> None:
    reports = child.read_reports()
    if not reports:
        status = child.wait(time.monotonic() + STOP_S)
        raise PartFailed(
            f"{child.name} ended with status {status} before it was ready; see its log"
        )
    for report in reports:
        if report.error:
            kind = InputError if report.is_input else PartFailed
            raise kind(f"{child.name}: {report.error}")
        child.url = report.url


def wait_until_routed(url: str, names: set[str], timeout_s: float = ROUTED_S) -> None:
    """Wait until a router has found these workers and all are up."""
    deadline = time.monotonic() + timeout_s
    while missing := names - _up_at(url):
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
