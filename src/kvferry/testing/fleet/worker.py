"""One rank in a process of its own, which serves the fleet's requests over a pipe.

A request is a method's name with its arguments, an answer its value or its error. The process ends
when the fleet closes the pipe.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.freeze_gc import freeze_gc
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.outgoing import Outgoing
from kvferry.endpoint.setup import make_transports
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.ids import Room
from kvferry.layout.layout import Layout
from kvferry.layout.spec import StateRow
from kvferry.memory.pools import Memory
from kvferry.plan.plan import Request
from kvferry.protocol.outcome import Outcome
from kvferry.regions import Device
from kvferry.security.keys import ClusterKey
from kvferry.testing.faulty_transport import ContentFault, FaultyTransport
from kvferry.testing.fleet.inspector import RankInspector
from kvferry.testing.fleet.pools import (
    Content,
    Mirror,
    PlacedTokens,
    RoomPages,
    TestPools,
    allocate_on,
    held_positions,
    plain_copy_s,
)
from kvferry.testing.fleet.turns import Turns
from kvferry.transports.transport_set import TransportSet

# A chunk's tokens, and its pages by group.
_Pushed = tuple[tuple[int, int], dict[str, list[int]]]


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a rank."""

    role: str
    name: str
    rank: int
    layout: Layout
    transport: str
    discovery: str
    num_pages: int
    num_rows: int = 16
    model: str = "test-model"
    device: str = "cpu"
    key_file: str | None = None
    config: EndpointConfig = EndpointConfig()
    # A source makes this fault in a write.
    fault: ContentFault | None = None


class RankRooms:
    """The rooms of one rank: their handles, pages and ends, until they are forgotten."""

    def __init__(self) -> None:
        self.handles: dict[Room, Any] = {}
        self.where: dict[Room, RoomPages] = {}
        self._ended_at: dict[Room, float] = {}

    def add(self, room: Room, handle: Any) -> None:
        """Add a room that has begun."""
        self.handles[room] = handle
        handle.on_end(lambda _: self._ended_at.__setitem__(room, time.monotonic()))

    def place(self, room: Room, where: RoomPages) -> None:
        """Note the pages of a room, with whatever is in them."""
        self.where[room] = where

    def forget(self, room: Room) -> None:
        """Forget a room that has ended."""
        for table in (self.handles, self._ended_at, self.where):
            table.pop(room, None)

    def rooms(self) -> list[Room]:
        """Return the rooms that were not forgotten."""
        return list(self.handles)

    def pages_of(self, room: Room) -> RoomPages:
        """Return the pages of a room."""
        return self.where[room]

    def outcome(self, room: Room, timeout_s: float) -> Outcome:
        """Wait for a room's outcome."""
        outcome: Outcome = self.handles[room].wait(timeout_s)
        return outcome

    def ended(self, room: Room) -> float:
        """Return when a room ended, by the machine's monotonic clock."""
        return self._ended_at[room]


class FleetRankWorker:
    """An endpoint, its pools and its rooms."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        transports = make_transports(spec.transport, spec.config.host, spec.config.options)
        self._faulty: list[FaultyTransport] = []
        if spec.fault is not None and spec.role == "source":
            fault, cache = spec.fault, spec.layout.spec
            self._faulty = [FaultyTransport(each, fault, cache) for each in transports]
            transports = TransportSet(transports.name, self._faulty, lenient=False)
        memory, self._mirror = self._allocate(transports)
        self.pools = TestPools(spec.layout, spec.rank, memory, self._mirror.arrays)
        self.clear()
        kind = SourceEndpoint if spec.role == "source" else TargetEndpoint
        self.endpoint: Any = kind(
            spec.layout,
            memory,
            name=spec.name,
            rank=spec.rank,
            model=spec.model,
            transport=transports,
            discovery=spec.discovery,
            key=ClusterKey.read(spec.key_file) if spec.key_file else None,
            config=spec.config,
        )
        self._rooms = RankRooms()
        self._handles, self._where = self._rooms.handles, self._rooms.where
        inspector = RankInspector(self.endpoint, self._handles)
        turns = Turns(self.endpoint, self.pools, self._pages)
        self._parts = (self, self._rooms, inspector, turns)

    def answer(self, method: str, *args: Any) -> Any:
        """Call a method of a part, or of a room's handle, or return an attribute of one.

        The handle's room is the first argument; without arguments the endpoint is asked.
        """
        for part in self._parts:
            if hasattr(part, method):
                return getattr(part, method)(*args)
        found = getattr(self._handles[args[0]] if args else self.endpoint, method)
        return found(*args[1:]) if callable(found) else found

    def _allocate(self, transports: TransportSet) -> tuple[Memory, Mirror]:
        spec = self.spec
        if spec.device != "cpu":
            return allocate_on(
                Device.parse(spec.device), spec.layout, spec.rank, spec.num_pages, spec.num_rows
            )
        memory = Memory.allocate(
            spec.layout, spec.rank, spec.num_pages, transports.allocate, spec.num_rows
        )
        assert isinstance(memory.owners, list)
        return memory, Mirror(memory.owners)

    # ------------------------------------------------------------ any rank

    def num_faults(self) -> int:
        """Number of faults that were made here."""
        return sum(transport.made for transport in self._faulty)

    def clear(self) -> None:
        """Fill the pools with the background."""
        self.pools.clear()
        self._mirror.upload()

    def plain_copy_s(self, num_bytes: int) -> float:
        """Return how long a plain copy takes on this rank's GPU."""
        return plain_copy_s(Device.parse(self.spec.device), num_bytes)

    # ------------------------------------------------------------ a source

    def open(self, room: Room, deadline_s: float) -> None:
        """Open a room."""
        handle: Outgoing = self.endpoint.open(room, deadline_s=deadline_s)
        self._rooms.add(room, handle)

    def fill(self, room: Room, seed: int, where: RoomPages, num_tokens: int) -> None:
        """Fill a room's pages and state row with its pattern."""
        self._rooms.place(room, where)
        self.pools.fill(seed, where, range(num_tokens), states=True)
        self._mirror.upload()

    def fill_placed(self, room: Room, seed: int, where: RoomPages, placed: PlacedTokens) -> None:
        """Fill the slots that an engine gives to tokens with a room's pattern."""
        self._rooms.place(room, where)
        self.pools.fill_placed(seed, placed)
        self._mirror.upload()

    def push(self, room: Room, tokens: tuple[int, int]) -> None:
        """Push a chunk."""
        self._handles[room].push(tokens, self._pages(self._where[room], range(*tokens)))

    def prepare(self, room: Room, tokens: tuple[int, int]) -> None:
        """Ask for credits."""
        self._handles[room].prepare(tokens, self._pages(self._where[room], range(*tokens)))

    def _pages(self, where: RoomPages, tokens: range) -> dict[str, list[int]]:
        """Return the pages of a chunk at this rank, by group."""
        spec = self.spec.layout
        found: dict[str, list[int]] = {}
        for shard in spec.rank_shards(self.spec.rank):
            group = spec.spec.group(shard.group)
            if isinstance(group.kind, StateRow):
                continue
            held = held_positions(shard.tokens, tokens.stop)
            local = np.arange(np.searchsorted(held, tokens.start), len(held))
            places = np.unique(local // spec.page_entries(group))
            found[shard.group] = [where.pages[place] for place in places]
        return found

    def finish(self, room: Room, metadata: bytes, num_tokens: int) -> None:
        """Close a room."""
        self._handles[room].close(metadata, states=self._where[room].row, tokens=num_tokens)

    def push_all(
        self,
        room: Room,
        num_tokens: int,
        chunk: int,
        metadata: bytes,
        layers: int | None = None,
        begin: float = 0.0,
    ) -> float:
        """Push and close an open room; return when that began.

        With ``layers``, each push has that many layers; otherwise each chunk is prepared before
        the previous one is pushed. Ranks that compute together start at the same time ``begin``.
        """
        spans = [(at, min(at + chunk, num_tokens)) for at in range(0, num_tokens, chunk)]
        chunks = [(span, self._pages(self._where[room], range(*span))) for span in spans]
        time.sleep(max(0.0, begin - time.monotonic()))
        began = time.monotonic()
        if layers is None:
            self._push_chunks(room, chunks)
        else:
            self._push_layers(room, chunks, layers)
        self.finish(room, metadata, num_tokens)
        return began

    def _push_chunks(self, room: Room, chunks: list[_Pushed]) -> None:
        handle = self._handles[room]
        for one, following in itertools.zip_longest(chunks, chunks[1:]):
            if following:
                handle.prepare(*following)
            handle.push(*one)

    def _push_layers(self, room: Room, chunks: list[_Pushed], layers: int) -> None:
        """Push the last chunk first, and every second chunk by layers, the upper layers first.

        State rows go with the layers of the last chunk.
        """
        handle, end = self._handles[room], self.spec.layout.spec.num_layers
        groups = [(at, min(at + layers, end)) for at in range(0, end, layers)]
        for number, (tokens, pages) in enumerate(reversed(chunks)):
            if number % 2:
                handle.push(tokens, pages)
                continue
            states = None if number else self._where[room].row
            for some in reversed(groups):
                handle.push(tokens, pages, layers=some, states=states)

    def push_paced(
        self, room: Room, num_tokens: int, layer_s: float, layers: int, metadata: bytes
    ) -> float:
        """Push one chunk by layers that take ``layer_s`` each; return when the last was ready."""
        handle, end = self._handles[room], self.spec.layout.spec.num_layers
        pages = self._pages(self._where[room], range(num_tokens))
        handle.prepare((0, num_tokens), pages)
        began = time.monotonic()
        for first in range(0, end, layers):
            some = (first, min(first + layers, end))
            # The clock runs from the start, so the time of a push is hidden, as on a GPU.
            time.sleep(max(0.0, began + some[1] * layer_s - time.monotonic()))
            computed = time.monotonic()
            handle.push((0, num_tokens), pages, layers=some)
        self.finish(room, metadata, num_tokens)
        return computed

    def serve_rooms(self, series: int, num_rooms: int, at_once: int) -> None:
        """Send rooms of one page, a few ahead of the target."""
        ahead: deque[Outgoing] = deque()
        for number in range(num_rooms):
            if len(ahead) > at_once:
                ahead.popleft().wait_released(60.0)
            handle: Outgoing = self.endpoint.open(f"{series}/{number}")
            handle.push((0, self.spec.layout.page_tokens), [number % (at_once + 1)])
            handle.close(b"first token")
            ahead.append(handle)
        for handle in ahead:
            handle.wait_released(60.0)

    # ------------------------------------------------------------ a target

    def ask_rooms(
        self, prefill: str, series: int, num_rooms: int, at_once: int
    ) -> tuple[list[float], float]:
        """Receive rooms of one page, some in parallel; return the time of each and of all."""
        numbers = iter(range(num_rooms))
        seconds: list[float] = []
        all_ended = threading.Event()

        def ask(page: int) -> None:
            number = next(numbers, None)
            if number is None:
                return
            begin = time.perf_counter()
            handle: Incoming = self.endpoint.receive(
                f"{series}/{number}",
                prefill=prefill,
                tokens=self.spec.layout.page_tokens,
                pages=[page],
            )
            handle.on_end(lambda _: seconds.append(time.perf_counter() - begin))
            handle.on_release(lambda: ended(page))

        def ended(page: int) -> None:
            if len(seconds) == num_rooms:
                all_ended.set()
            ask(page)

        begin = time.perf_counter()
        for page in range(at_once):
            ask(page)
        if not all_ended.wait(300.0):
            raise TimeoutError(f"only {len(seconds)} of {num_rooms} rooms ended")
        return seconds, time.perf_counter() - begin

    def receive(
        self, room: Room, prefill: str, request: Request, where: RoomPages, deadline_s: float
    ) -> None:
        """Receive a room."""
        self._rooms.place(room, where)
        handle: Incoming = self.endpoint.receive(
            room,
            prefill=prefill,
            tokens=request.num_tokens,
            prefix=request.prefix,
            pages=dict.fromkeys(
                (group.name for group in self.spec.layout.spec.groups), where.pages
            ),
            states=where.row,
            deadline_s=deadline_s,
        )
        self._rooms.add(room, handle)

    def placed_problem(self, seed: int, placed: PlacedTokens) -> str | None:
        """Return what is wrong if the pools should have these slots and nothing else."""
        self._mirror.download()
        return self.pools.placed_problem(seed, placed)

    def problem(self, room: Room, seed: int, request: Request) -> str | None:
        """Return what is wrong if the pools should have this room and nothing else."""
        return self.problem_among([(room, seed, request)])

    def problem_among(self, rooms: list[tuple[Room, int, Request]]) -> str | None:
        """Return what is wrong if the pools should have these rooms and nothing else."""
        self._mirror.download()
        contents = [Content(seed, self._where[room], request) for room, seed, request in rooms]
        return self.pools.problem(contents)

    def room_problem(self, room: Room, seed: int, request: Request) -> str | None:
        """Return what is wrong with a room, ignoring all other pages."""
        self._mirror.download()
        return self.pools.room_problem(Content(seed, self._where[room], request))


def serve(pipe: Connection) -> None:
    """Run a rank's process until the fleet closes the pipe."""
    # Ctrl-C ends a rank at once and silently: the fleet reports the interruption.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    logging.basicConfig(level=os.environ.get("KVFERRY_TEST_LOG", "ERROR"))
    worker: FleetRankWorker | None = None
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionError):
            break
        answer = None
        try:
            if method == "start":
                worker = FleetRankWorker(*args)
                freeze_gc()
            else:
                assert worker is not None
                answer = worker.answer(method, *args)
            pipe.send((True, answer))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
    if worker is not None:
        worker.endpoint.close(timeout_s=0.0)
