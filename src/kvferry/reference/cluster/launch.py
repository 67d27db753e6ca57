"""The processes of a cluster on this machine: one part, alone or as a child, and all of them.

A child and its parent share a pipe. The child receives what to run, and reports that it is ready,
or why it is not. When the pipe ends, the parent wants the child to stop, or is gone: so children
end with their parent, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple, NoReturn
from urllib.request import urlopen

import msgspec

from kvferry import InputError, KvferryError, Refused, TransportError, freeze_gc
from kvferry.reference.cluster.description import (
    ClusterDescription,
    DiscoveryOptions,
    PartOptions,
    router_options,
    worker_options,
)
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.options import InstanceOptions
from kvferry.router.options import RouterOptions
from kvferry.telemetry.logs.lines import LogSettings, install

log = logging.getLogger("kvferry.launch")

ROUTED_S = 60.0
HEALTH_S = 5.0
# From the end of a child's pipe until it ends itself, and until its parent kills it.
GRACE_S, STOP_S = 15.0, 20.0
DRAINED_S = 0.2
CHILD = "from kvferry.reference.cluster.launch import child_main; child_main({})"

Ready = Callable[[str], None]
PartReady = Callable[[str, str], None]


# ---------------------------------------------------------------- one part


def run_part(name: str, options: PartOptions, log_level: str, ready: Ready) -> None:
    """Serve until SIGINT or SIGTERM; call ``ready`` with the address once it serves.

    Raises ``KvferryError`` if it cannot start or go on. Each part imports only what it needs:
    only a worker needs torch. It logs to standard error.
    """
    from kvferry.http.limits import raise_open_files  # noqa: PLC0415

    def serves(address: str) -> None:
        freeze_gc()
        ready(address)

    # A worker's own process is its rank 0.
    install(LogSettings(name, log_level, 0 if isinstance(options, InstanceOptions) else None))
    raise_open_files()
    match options:
        case DiscoveryOptions():
            asyncio.run(_run_discovery(options, serves))
        case RouterOptions():
            from kvferry.router.serving import run_router  # noqa: PLC0415

            run_router(options, serves)
        case InstanceOptions():
            from kvferry.reference.worker.instance import run_instance  # noqa: PLC0415

            run_instance(options, serves)


async def _run_discovery(options: DiscoveryOptions, ready: Ready) -> None:
    from kvferry import DiscoveryServer, StatusServer  # noqa: PLC0415
    from kvferry.http.listening import load_cluster_key  # noqa: PLC0415

    section, stopped = options.section, asyncio.Event()
    _on_signal(stopped.set)
    listening = section.host, section.port, load_cluster_key(options.key)
    server: DiscoveryServer | StatusServer = (
        StatusServer(section.existing, *listening, options.advertise)
        if section.existing
        else DiscoveryServer(*listening)
    )
    with server:
        ready(server.url)
        await stopped.wait()


def _on_signal(call: Callable[[], None]) -> None:
    """Have the event loop call a function on SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, call)


# ---------------------------------------------------------------- a child


class ChildReport(NamedTuple):
    """A child's address, or why it failed. ``is_input``: the user can correct it."""

    url: str = ""
    error: str = ""
    is_input: bool = False


def child_main(file: int) -> NoReturn:
    """Run as a child whose pipe is this file descriptor."""
    pipe, status = Connection(file), 0

    def report(said: ChildReport) -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(said)

    try:
        name, options = pipe.recv()
        ending = threading.Thread(target=_end_with_parent, args=(pipe,), name="kvferry-parent")
        ending.daemon = True
        ending.start()
        run_part(name, options, "WARNING", lambda url: report(ChildReport(url=url)))
    except EOFError:
        log.info("parent-gone")
    except KvferryError as error:
        is_input = isinstance(error, InputError | Refused | TransportError)
        report(ChildReport(error=str(error), is_input=is_input))
        status = 1
    # Exit without waiting for the engine's thread, which may be in the middle of a step.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    # A worker drains at the first, and ends at the second.
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(DRAINED_S)
    time.sleep(GRACE_S)
    os._exit(1)


# ---------------------------------------------------------------- the whole cluster


class PartFailed(KvferryError):
    """A part of the cluster could not start, or ended; the message says which and why."""


class ChildProcess:
    """One part. ``url`` is set once it is ready. ``output`` takes all that it prints."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    def __init__(self, name: str, options: PartOptions, output: IO[bytes] | int) -> None:
        self.name = name
        self.options = options
        self.url = ""
        self._output = output

    def start(self) -> None:
        """Start the process; a part that has ended may be started again."""
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD.format(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C in a terminal goes to its foreground group, which is the parent's alone.
                process_group=0,
            )
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((self.name, self.options))

    def demand_ready(self) -> None:
        """Take the child's first report, or raise the error why there is none."""
        try:
            report: ChildReport = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            status = self.wait(time.monotonic() + STOP_S)
            raise PartFailed(
                f"{self.name} ended with status {status} before it was ready; see its log"
            ) from None
        if report.error:
            raise (InputError if report.is_input else PartFailed)(f"{self.name}: {report.error}")
        self.url = report.url

    def wait(self, deadline: float) -> int:
        """Let the child end, and return its exit status; kill it at the deadline."""
        self.pipe.close()
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("killed name=%s", self.name)
            self.process.kill()
            return self.process.wait()


class ClusterLaunch:
    """The processes of one cluster. Leaving the block ends them all. Belongs to one thread."""

    def __init__(self, *, output: IO[bytes] | None = None) -> None:
        self.children: list[ChildProcess] = []
        # By default to standard error.
        self._output: IO[bytes] | int = 2 if output is None else output

    def __enter__(self) -> ClusterLaunch:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __getitem__(self, name: str) -> ChildProcess:
        return next(child for child in self.children if child.name == name)

    def start_all(self, cluster: ClusterDescription, model: ModelFolder, ready: PartReady) -> str:
        """Start every part; return the router's address once requests can be answered.

        ``ready`` is called with the name and the address of each part.
        """
        section, workers = cluster.discovery, cluster.workers()
        address = section.existing
        if not address or section.needs_status:
            options = DiscoveryOptions(section=section, key=cluster.key)
            child = self._start("status" if address else "discovery", options)
            self.wait_ready([child], ready)
            address = address or child.url
        children = [
            self._start(worker.name, worker_options(cluster, worker, model, address))
            for worker in workers
        ]
        self.wait_ready(children, ready)
        # Last: with decode alone it would let decode compute the first prompts.
        router = self._start("router", router_options(cluster, address))
        self.wait_ready([router], ready)
        _wait_until_routed(router.url, {worker.name for worker in workers})
        return router.url

    def _start(self, name: str, options: PartOptions) -> ChildProcess:
        child = ChildProcess(name, options, self._output)
        self.children.append(child)
        child.start()
        return child

    def wait_ready(
        self, children: Iterable[ChildProcess], ready: PartReady = lambda *_: None
    ) -> None:
        """Wait until all are ready, or raise the error of the first that fails."""
        pending = {child.pipe: child for child in children}
        while pending:
            for pipe in wait(list(pending)):
                assert isinstance(pipe, Connection)
                child = pending.pop(pipe)
                child.demand_ready()
                ready(child.name, child.url)

    async def supervise(self) -> None:
        """Report workers that end, until SIGINT or SIGTERM.

        The others go on without them. Raises ``PartFailed`` if any other part ends.
        """
        here, news = asyncio.get_running_loop(), asyncio.Queue[ChildProcess | None]()

        def note(child: ChildProcess) -> None:
            here.remove_reader(child.pipe)
            news.put_nowait(child)

        _on_signal(partial(news.put_nowait, None))
        for child in self.children:
            here.add_reader(child.pipe, note, child)
        while (gone := await news.get()) is not None:
            name, status = gone.name, gone.wait(time.monotonic() + STOP_S)
            log.warning("ended name=%s status=%d", name, status)
            if not isinstance(gone.options, InstanceOptions):
                raise PartFailed(f"{name} ended with status {status}; see its log")

    def stop(self) -> None:
        """End the router, then the workers, then discovery, in bounded time. Idempotent."""
        for kind in (RouterOptions, InstanceOptions, DiscoveryOptions):
            ending = [child for child in self.children if isinstance(child.options, kind)]
            for child in ending:
                child.pipe.close()
            deadline = time.monotonic() + STOP_S
            for child in ending:
                child.wait(deadline)
        self.children = []


def health(url: str) -> dict[str, Any]:
    """Return what a worker or a router says of itself; empty if it does not answer."""
    try:
        with urlopen(f"{url}/healthz", timeout=HEALTH_S) as response:
            return msgspec.json.decode(response.read(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def _wait_until_routed(url: str, names: set[str]) -> None:
    """Wait until a router has found these workers and all are up."""
    deadline = time.monotonic() + ROUTED_S
    while missing := names - {one["name"] for one in health(url).get("workers", ()) if one["up"]}:
        if time.monotonic() > deadline:
            raise PartFailed(f"the router has not found {', '.join(sorted(missing))}; see its log")
        time.sleep(0.05)
