"""Links of one endpoint to many simulated peers: opened at once, and idle."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.scaling.measuring import (
    MIN_BYTES,
    MIN_CORES,
    SCRIPT,
    Result,
    Watched,
    bars_of,
    growth,
    line_of,
    say,
    started,
)
from kvferry import SourceEndpoint, TargetEndpoint, Transport, make_transport
from kvferry.discovery.records import InstanceView, RankView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.bundles import bundle, unbundle
from kvferry.endpoint.control.sockets import ControlClient, ControlServer, new_context
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.runner.runner import frame_event
from kvferry.endpoint.setup import set_up
from kvferry.http.limits import raise_open_files
from kvferry.ids import Peer
from kvferry.layout import Layout, attention
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.events import (
    Connect,
    Decline,
    Event,
    Instance,
    MemoryReached,
    Send,
    Tick,
)
from kvferry.protocol.links import Identity
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine

OPEN_S = 60.0
SMALL = Layout(attention(layers=2, kv_heads=1, head_dim=16), page_tokens=16)
MODEL = "scale@1"


def new_pools(transport: Transport) -> dict[str, dict[str, Any]]:
    shape = (SMALL.spec.num_layers, 2, 8, 16, 1, 16)
    kv = transport.allocate(2 * math.prod(shape)).view(np.uint16).reshape(shape)
    return {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}


def serve_source() -> None:
    """Be the measured endpoint, until stdin ends."""
    raise_open_files()
    shm = make_transport("shm")
    pools = new_pools(shm)
    with SourceEndpoint(SMALL, pools, name="prefill", model=MODEL, transport=shm) as source:
        print(source.record.control, flush=True)
        sys.stdin.read()


def serve_target() -> None:
    """Be the measured endpoint: open links to the sources on stdin, then wait for its end."""
    raise_open_files()
    shm = make_transport("shm")
    pools = new_pools(shm)
    with TargetEndpoint(SMALL, pools, name="decode", model=MODEL, transport=shm) as target:
        print("ready", flush=True)
        for line in sys.stdin:
            addresses: list[str] = json.loads(line)
            for index, control in enumerate(addresses):
                ranks = (RankView(0, index + 1, control),)
                view = InstanceView(f"prefill-{index}", "1", MODEL, SMALL, "shm", ranks)
                target.decline(f"room-{index}", prefill=view)


class SimulatedSources:
    """Source machines without memory, each with a listener of its own."""

    def __init__(self, number: int) -> None:
        shm = make_transport("shm")
        identity = Identity(Peer("prefill-0", 0), 1, SMALL, MODEL)
        self._setup = set_up(identity, new_pools(shm), shm, EndpointConfig(), writable=False)
        self._poller = Poller()
        self.machines: list[SourceMachine] = []
        self.servers: list[ControlServer] = []
        self._routes: list[bytes] = [b""] * number
        self._by_socket: dict[object, int] = {}
        self.frames = 0
        for index in range(number):
            me = msgspec.structs.replace(
                self._setup.identity, peer=Peer(f"prefill-{index}", 0), incarnation=index + 1
            )
            self.machines.append(SourceMachine(me, EndpointConfig().protocol))
            server = ControlServer("127.0.0.1")
            self.servers.append(server)
            for socket in server.sockets:
                self._poller.watch(socket)
                self._by_socket[socket] = index

    @property
    def num_up(self) -> int:
        links = (link for machine in self.machines for link in machine.links.values())
        return sum(link.state is LinkState.UP for link in links)

    def turn(self) -> None:
        ready = self._poller.wait(0.05)
        for index in {self._by_socket[one] for one in ready}:
            for route, message in self.servers[index].receive(ready):
                self._routes[index] = route
                for frame in unbundle(message) or ():
                    event = frame_event(decode(frame))
                    if event is not None:
                        self.frames += 1
                        self._handle(index, event)
        now = time.monotonic()
        for index, machine in enumerate(self.machines):
            due = machine.wakeup()
            if due is not None and due <= now:
                self._handle(index, Tick())

    def _handle(self, index: int, event: Event) -> None:
        server = self.servers[index]
        for action in self.machines[index].handle(event, time.monotonic()):
            if isinstance(action, Connect):
                self._handle(index, MemoryReached(action.session, "shm"))
            elif isinstance(action, Send):
                self.frames += 1
                for message in bundle([encode(action.envelope)]):
                    server.send(self._routes[index], message)
        self._poller.mark_used(server.socket)

    def close(self) -> None:
        for server in self.servers:
            server.close(0)
        self._setup.close()


class SimulatedTargets:
    """Target machines without memory or threads, each with a real connection to the source."""

    def __init__(self, control: str, number: int) -> None:
        identity = Identity(Peer("decode-0", 0), 1, SMALL, MODEL)
        config, shm = EndpointConfig(), make_transport("shm")
        self._setup = set_up(identity, new_pools(shm), shm, config, writable=True)
        self._context, self._poller = new_context(), Poller()
        self._prefill = Instance("prefill", MODEL, SMALL)
        self.machines: list[TargetMachine] = []
        self._clients: list[ControlClient] = []
        self._by_socket: dict[object, int] = {}
        self.frames = 0
        memory, staging = self._setup.memory.map, self._setup.staging
        for index in range(number):
            me = msgspec.structs.replace(
                self._setup.identity, peer=Peer(f"decode-{index}", 0), incarnation=index + 1
            )
            self.machines.append(TargetMachine(me, config.protocol, memory, staging))
            client = ControlClient(control, None, self._context)
            self._clients.append(client)
            for socket in client.sockets:
                self._poller.watch(socket)
                self._by_socket[socket] = index

    def open_all(self) -> float:
        """Open every link; return the seconds until the last one is up."""
        begin = time.monotonic()
        for index in range(len(self.machines)):
            self._handle(index, Decline(f"room-{index}", self._prefill))
        while self.num_up < len(self.machines):
            if time.monotonic() > begin + OPEN_S:
                raise SystemExit(f"only {self.num_up} of {len(self.machines)} links opened")
            self.turn()
        return time.monotonic() - begin

    @property
    def num_up(self) -> int:
        links = (link for machine in self.machines for link in machine.links.values())
        return sum(link.state is LinkState.UP for link in links)

    def turn(self) -> None:
        ready = self._poller.wait(0.05)
        for index in {self._by_socket[one] for one in ready}:
            for message in self._clients[index].receive(ready):
                for frame in unbundle(message) or ():
                    event = frame_event(decode(frame))
                    if event is not None:
                        self.frames += 1
                        self._handle(index, event)
        now = time.monotonic()
        for index, machine in enumerate(self.machines):
            due = machine.wakeup()
            if due is not None and due <= now:
                self._handle(index, Tick())

    def _handle(self, index: int, event: Event) -> None:
        client = self._clients[index]
        for action in self.machines[index].handle(event, time.monotonic()):
            if isinstance(action, Send):
                self.frames += 1
                for message in bundle([encode(action.envelope)]):
                    client.send(message)
        self._poller.mark_used(client.socket)

    def close(self) -> None:
        for client in self._clients:
            client.close(0)
        self._context.destroy(0)
        self._setup.close()


def measure_source(number: int, window_s: float) -> Result:
    """Open links of a real source endpoint to simulated targets, and let them idle."""
    with started(sys.executable, str(SCRIPT), "--serve-source") as child:
        control, source = line_of(child), Watched(child.pid)
        peers = SimulatedTargets(control, number)
        row = measure_links(source, peers, peers.open_all, window_s)
    say(f"source: {row}")
    return row


def measure_target(number: int, window_s: float) -> Result:
    """Open links of a real target endpoint to simulated sources, and let them idle."""
    with started(sys.executable, str(SCRIPT), "--serve-target") as child:
        line_of(child)
        peers, target = SimulatedSources(number), Watched(child.pid)

        def open_all() -> float:
            begin = time.monotonic()
            assert child.stdin is not None
            print(json.dumps([one.address for one in peers.servers]), file=child.stdin, flush=True)
            while peers.num_up < number:
                if time.monotonic() > begin + OPEN_S:
                    raise SystemExit(f"only {peers.num_up} of {number} links opened")
                peers.turn()
            return time.monotonic() - begin

        row = measure_links(target, peers, open_all, window_s)
    say(f"target: {row}")
    return row


def measure_links(
    endpoint: Watched,
    peers: SimulatedSources | SimulatedTargets,
    open_all: Callable[[], float],
    window_s: float,
) -> Result:
    number = len(peers.machines)
    bytes_before, files_before = endpoint.rss_bytes(), endpoint.num_files()
    cpu_before = endpoint.cpu_s()
    open_s = open_all()
    open_cpu_s = endpoint.cpu_s() - cpu_before
    settled = time.monotonic() + 1.0
    while time.monotonic() < settled:
        peers.turn()
    endpoint.cores()
    frames, begin = peers.frames, time.monotonic()
    while time.monotonic() < begin + window_s:
        peers.turn()
    idle_cores = endpoint.cores()
    row = {
        "links": number,
        "open_s": round(open_s, 3),
        # Links that are open cost CPU while others open, for longer on a busy machine.
        "open_cpu_s": round(max(0.0, open_cpu_s - idle_cores * open_s), 3),
        "idle_cores": round(idle_cores, 4),
        "frames_per_s": round((peers.frames - frames) / window_s),
        "rss_bytes": endpoint.rss_bytes() - bytes_before,
        "files": endpoint.num_files() - files_before,
        "lost": number - peers.num_up,
    }
    peers.close()
    return row


def run_links(
    side: str, measure: Callable[[int, float], Result], sizes: list[int], window_s: float
) -> Result:
    rows = [measure(size, window_s) for size in sizes]
    least = {"open_cpu_s": 0.1, "idle_cores": MIN_CORES, "rss_bytes": MIN_BYTES, "files": 16}
    exponents = growth(rows, "links", least)
    lost = sum(row["lost"] for row in rows)
    bars = bars_of(side, exponents)
    bars.append({"bar": f"{side}: no link is lost", "value": lost, "limit": 0, "holds": not lost})
    return {"rows": rows, "exponents": exponents, "bars": bars}
