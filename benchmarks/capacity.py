"""Compare ``kvferry plan --load`` with hand-offs that really happen at random times.

    .venv/bin/python benchmarks/capacity.py --transport shm --instances 2x2

Prefill and decode processes carry rooms that begin at random (Poisson) times, each at the pair with
the fewest rooms, at a low, a middle and a high share of what the links can carry. The prediction
knows when rooms begin and two measured costs, none of them from such rooms: of a write, by the
endpoint when it connects, or for a transport that maps the peer by copies of a request's pages in
one process; and of messages, by rooms of one page that begin one after the other. With
``--gb-per-s`` each write takes as long as its bytes take on a link of that speed. Every byte is
checked in the first room of each pair, and every room must end well. The last line is JSON; the
exit status is 1 if at one load the hand-offs in flight are predicted wrong by more than 1, or the
median by more than 30 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from kvferry import (
    DiscoveryServer,
    Done,
    Layout,
    LinkCost,
    SourceEndpoint,
    TargetEndpoint,
    attention,
    digest_of,
    make_transport,
)
from kvferry.layout import DType, Order
from kvferry.memory.copy.cpu import copy_binding
from kvferry.plan import Plan, Request, estimate, reshard
from kvferry.plan.bind import Binding, PagedView, RankPair, bind
from kvferry.plan.capacity import (
    WARM_UP,
    HandOffCost,
    LoadPrediction,
    Resource,
    ServingLoad,
    hand_off_cost,
    limits_of,
    predict,
)
from kvferry.plan.places import Base, PageTable, contiguous_pools
from kvferry.telemetry.observer import ObservedWrite, Observer
from kvferry.transports.base import Transport, TransportSetup
from kvferry.transports.shm import ShmTransport

PAGE_TOKENS = {"prefill": 16, "decode": 64}
NUM_TOKENS = 1024
# Rooms that can be in flight at once; a higher number is a backlog that never ends.
NUM_ROOMS_AT_ONCE = 24
SHARES = (0.3, 0.6, 0.85)
# Rooms that begin one after the other, so that each is alone, and rooms that begin at once.
NUM_ALONE, ALONE_S, NUM_AT_ONCE = 40, 0.1, 96
START_S, ROOM_S = 0.1, 120.0


class Seen(NamedTuple):
    """Measured or predicted effects of a load."""

    p50_ms: float
    p99_ms: float
    in_flight: float


class Writes(Observer):
    """The seconds of the writes that have ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def write(self, job: ObservedWrite, at: float) -> None:
        self.seconds.append(job.seconds)


def layout_of(side: str, layers: int) -> Layout:
    order = Order.NHD if side == "prefill" else Order.HND
    spec = attention(layers=layers, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
    return Layout(spec, page_tokens=PAGE_TOKENS[side], order=order)


def main() -> int:
    args = arguments()
    with DiscoveryServer() as server, started(server.url, args) as pool:
        document = measure(pool, args)
    for row in document["loads"]:
        say(
            f"{row['share']:.0%}, {row['rooms_per_s']:.1f} rooms/s: "
            f"in flight {row['measured']['in_flight']:.2f}, "
            f"predicted {row['predicted']['in_flight']:.2f} ({row['in_flight_error']:+.2f}); "
            f"p50 {row['measured']['p50_ms']:.2f} ms, predicted {row['predicted']['p50_ms']:.2f} "
            f"({row['p50_error']:+.0%}); p99 {row['measured']['p99_ms']:.2f} ms, "
            f"predicted {row['predicted']['p99_ms']:.2f} ({row['p99_error']:+.0%}); "
            f"{'holds' if row['within_bars'] else 'FAILS'}"
        )
    print(json.dumps(document))
    return 0 if document["within_bars"] else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--gb-per-s", type=float, help="slow the writes of shm down to this speed")
    parser.add_argument("--instances", default="1x1", help="prefill and decode processes")
    parser.add_argument("--layers", type=int, default=16, help="16 layers are 64 MiB a room")
    parser.add_argument("--rooms", type=int, default=600, help="rooms of each load")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# ---------------------------------------------------------------- one process


class Begin(NamedTuple):
    """The order to begin a room: ``place`` names its pages, ``prefill`` its source."""

    number: int
    room: str
    prefill: str
    place: int
    num_tokens: int


class Ended(NamedTuple):
    """A room has ended at its target."""

    number: int
    at: float
    failure: str


def pools_of(side: str, args: argparse.Namespace) -> tuple[Any, Layout, Any]:
    """Return a transport, a layout and its memory, with pages for all rooms at once."""
    layout = layout_of(side, args.layers)
    transport = paced(args.gb_per_s) if args.gb_per_s else make_transport(args.transport)
    pages = NUM_ROOMS_AT_ONCE * NUM_TOKENS // PAGE_TOKENS[side]
    inner = (PAGE_TOKENS[side], 8, 128) if side == "prefill" else (8, PAGE_TOKENS[side], 128)
    shape = (args.layers, 2, pages, *inner)
    kv = transport.allocate(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
    return transport, layout, kv


def paced(gb_per_s: float) -> Transport:
    """Return a transport over shared memory whose writes take as long as on a link of a speed."""

    def copy(pieces: Binding, sources: Sequence[int], targets: Sequence[int]) -> None:
        until = time.monotonic() + pieces.size[0] / gb_per_s / 1e9
        copy_binding(pieces, sources, targets)
        time.sleep(max(0.0, until - time.monotonic()))

    return ShmTransport(TransportSetup(agent=f"paced-{os.getpid()}", copy=copy))


@functools.cache
def digest(num_tokens: int) -> bytes:
    return digest_of(range(num_tokens), model="m", dtype="bf16")


def pages_of(side: str, place: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the pages of a room's place; no two are adjacent."""
    num_pages = num_tokens // PAGE_TOKENS[side]
    return [place + NUM_ROOMS_AT_ONCE * i for i in range(num_pages)]


def sum_of(side: str, kv: Any, place: int) -> int:
    """Return a checksum of a place's pages that depends on where each element is."""
    cells = kv[:, :, pages_of(side, place)]
    rows = cells if side == "prefill" else cells.swapaxes(3, 4)
    rows = rows.reshape(*rows.shape[:2], NUM_TOKENS, 8, 128)
    weights = np.arange(1, rows[0, 0].size + 1, dtype=np.uint64).reshape(rows.shape[2:])
    return int(sum((one * weights).sum() for layer in rows for one in layer))


def serve(pipe: Connection, side: str, name: str, url: str, args: argparse.Namespace) -> None:
    """Do what the pipe orders: begin rooms, and tell costs, times of writes and checksums."""
    transport, layout, kv = pools_of(side, args)
    numbers = np.random.default_rng(len(name) + ord(name[-1]))
    if side == "prefill":
        kv[:] = numbers.integers(0, 1 << 16, kv.shape, dtype=np.uint16)
    pools, writes = {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}, Writes()
    options = {"name": name, "model": "m", "transport": transport, "discovery": url}
    make: Any = SourceEndpoint if side == "prefill" else TargetEndpoint
    with make(layout, pools, observer=writes, **options) as endpoint:
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            match order:
                case Begin():
                    begin = begin_source if side == "prefill" else begin_target
                    begin(endpoint, order, pipe)
                case "cost":
                    pipe.send((transport.maps_peer, endpoint.link_cost))
                case "writes":
                    pipe.send(writes.seconds)
                    writes.seconds = []
                case int():
                    pipe.send(sum_of(side, kv, order))


def begin_source(source: SourceEndpoint, order: Begin, pipe: Connection) -> None:
    room = source.open(order.room, deadline_s=ROOM_S)
    room.push((0, order.num_tokens), pages_of("prefill", order.place, order.num_tokens))
    room.close(digest=digest(order.num_tokens))


def begin_target(target: TargetEndpoint, order: Begin, pipe: Connection) -> None:
    handle = target.receive(
        order.room,
        prefill=order.prefill,
        tokens=order.num_tokens,
        pages=pages_of("decode", order.place, order.num_tokens),
        digest=digest(order.num_tokens),
        deadline_s=ROOM_S,
    )

    def end(outcome: object) -> None:
        at = time.monotonic()
        failure = "" if isinstance(outcome, Done) else str(outcome)
        pipe.send(Ended(order.number, at, failure))

    handle.on_end(end)


# ---------------------------------------------------------------- all processes


class Member:
    """A process, and the rooms in flight there."""

    def __init__(self, name: str, pipe: Connection) -> None:
        self.name, self.pipe = name, pipe
        self.num_rooms = 0

    def ask(self, order: object) -> Any:
        self.pipe.send(order)
        return self.pipe.recv()


class Pool:
    """The prefill and decode processes, and a router that gives rooms to the least busy pair."""

    def __init__(self, prefills: list[Member], decodes: list[Member]) -> None:
        self.prefills, self.decodes = prefills, decodes
        self._num_rooms = 0
        self._pairs: dict[int, tuple[Member, Member]] = {}
        self._ends: dict[int, float] = {}

    def run(
        self,
        times: list[float],
        num_tokens: int = NUM_TOKENS,
        pair: tuple[Member, Member] | None = None,
    ) -> tuple[list[float], list[float]]:
        """Begin rooms at these times; return when each began, and the seconds that it took."""
        begin, began = time.monotonic() + START_S, {}
        for at in times:
            self._listen(begin + at)
            number = self._num_rooms = self._num_rooms + 1
            prefill, decode = pair or (_least(self.prefills), _least(self.decodes))
            order = Begin(
                *(number, f"room-{number}", prefill.name),
                *(number % NUM_ROOMS_AT_ONCE, num_tokens),
            )
            began[number] = time.monotonic()
            for one in (prefill, decode):
                one.pipe.send(order)
                one.num_rooms += 1
            self._pairs[number] = prefill, decode
        self._listen(time.monotonic() + ROOM_S)
        if self._pairs:
            raise SystemExit(f"{len(self._pairs)} rooms have not ended within {ROOM_S} s")
        seconds = [self._ends.pop(number) - at for number, at in began.items()]
        return [at - begin for at in began.values()], seconds

    def _listen(self, until: float) -> None:
        """Take the ends of rooms until a time, or until none is left and that time is far."""
        while (left := until - time.monotonic()) > 0:
            if not self._pairs and left > ROOM_S / 2:
                return
            ready = wait([one.pipe for one in self.decodes], left)
            for decode in self.decodes:
                if decode.pipe not in ready:
                    continue
                number, at, failure = decode.pipe.recv()
                if failure:
                    raise SystemExit(f"room {number} failed: {failure}")
                self._ends[number] = at
                for one in self._pairs.pop(number):
                    one.num_rooms -= 1

    def check_bytes(self) -> None:
        """Carry a room between each pair and compare its bytes."""
        for prefill in self.prefills:
            for decode in self.decodes:
                self.run([0.0], pair=(prefill, decode))
                place = self._num_rooms % NUM_ROOMS_AT_ONCE
                if prefill.ask(place) != decode.ask(place):
                    raise SystemExit("a first room arrived with other bytes")

    def warm_up(self) -> None:
        """Touch every page from every source, which takes longer than later writes."""
        for prefill in self.prefills:
            for decode in self.decodes:
                self.run([0.0] * NUM_ROOMS_AT_ONCE, pair=(prefill, decode))

    def writes(self) -> list[float]:
        """Return the seconds of all writes since the last call."""
        return [second for one in self.prefills for second in one.ask("writes")]


def _least(members: list[Member]) -> Member:
    return min(members, key=lambda one: one.num_rooms)


@contextmanager
def started(url: str, args: argparse.Namespace) -> Iterator[Pool]:
    """Run the processes, and end them."""
    context, sides = multiprocessing.get_context("spawn"), ("prefill", "decode")
    processes = []
    members: dict[str, list[Member]] = {side: [] for side in sides}
    for side, count in zip(sides, args.instances.split("x"), strict=True):
        for index in range(int(count)):
            here, there = context.Pipe()
            name = f"{side}-{index}"
            processes.append(context.Process(target=serve, args=(there, side, name, url, args)))
            processes[-1].start()
            members[side].append(Member(name, here))
    everyone = [one for side in sides for one in members[side]]
    try:
        for one in everyone:
            one.pipe.recv()
        yield Pool(*members.values())
    finally:
        for one, process in zip(everyone, processes, strict=True):
            one.pipe.send(None)
            process.join(30.0)


def schedule(rate: float, num_rooms: int, seed: int) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_rooms)
    return [float(at) for at in np.cumsum(gaps)]


# ---------------------------------------------------------------- measurement


def measure(pool: Pool, args: argparse.Namespace) -> dict[str, Any]:
    pool.check_bytes()
    pool.warm_up()
    maps_peer, link = pool.prefills[0].ask("cost")
    plan = reshard(*(layout_of(side, args.layers) for side in PAGE_TOKENS))
    link = with_messages(pool, plan, measured_copies(args) if maps_peer else link)
    cost = hand_off_cost(estimate(plan, Request(NUM_TOKENS), link))
    limits = limits_of(load_at(1.0, args), cost)
    limit = min(limits[Resource.SENDING], limits[Resource.RECEIVING])
    # The prediction does not know these. The times of writes show where it is wrong.
    rows = [compare(pool, cost, limit, share, args) for share in SHARES]
    _, alone = pool.run([i * ALONE_S for i in range(NUM_ALONE)])
    _, at_once = pool.run([0.0] * NUM_AT_ONCE)
    return {
        "transport": args.transport,
        "gb_per_s": args.gb_per_s,
        "instances": args.instances,
        "room_bytes": cost.num_bytes,
        "staged": cost.is_staged,
        "link_cost": msgspec.to_builtins(link),
        "predicted_write_ms": 1e3 * cost.send_s,
        "predicted_alone_ms": 1e3 * cost.alone_s,
        "alone_ms": 1e3 * statistics.median(alone),
        "limit_rooms_per_s": limit,
        "measured_limit_rooms_per_s": NUM_AT_ONCE / max(at_once),
        "loads": rows,
        "within_bars": all(row["within_bars"] for row in rows),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
    }


# ---------------------------------------------------------------- costs


def with_messages(pool: Pool, plan: Plan, link: LinkCost) -> LinkCost:
    """Return a link's cost with the seconds that a room of one page takes beside its write."""
    num_tokens = max(PAGE_TOKENS.values())
    _, seconds = pool.run([i * ALONE_S for i in range(NUM_ALONE)], num_tokens)
    write_s = hand_off_cost(estimate(plan, Request(num_tokens), link)).send_s
    return replace(link, room_s=max(statistics.median(seconds) - write_s, 0.0))


def measured_copies(args: argparse.Namespace) -> LinkCost:
    """Return the costs of writes into mapped memory, from copies in this process.

    Copies a request's pages as a write does, and as many bytes in one piece. The medians give the
    cost of a piece and of a byte.
    """
    if args.gb_per_s:
        speed = 1e9 * args.gb_per_s
        return LinkCost(descriptor_s=0, bytes_per_s=speed, copy_bytes_per_s=speed, maps_peer=True)
    transport = make_transport(args.transport)
    sides = [layout_of(side, args.layers) for side in ("prefill", "decode")]
    pools = [
        contiguous_pools(one, 0, NUM_ROOMS_AT_ONCE * NUM_TOKENS // one.page_tokens) for one in sides
    ]
    memory = [[transport.allocate(size) for size in one.region_bytes] for one in pools]
    for region in (*memory[0], *memory[1]):
        region[:] = 1
    addresses = [[region.ctypes.data for region in one] for one in memory]
    plan, request, pair = reshard(*sides), Request(NUM_TOKENS), RankPair(0, 0)
    pieces_s, bulk_s = [], []
    for place in (*range(NUM_ROOMS_AT_ONCE), *range(NUM_ROOMS_AT_ONCE)):
        source, target = (
            PagedView(one.map, {"kv": PageTable(pages_of(side, place))})
            for side, one in zip(PAGE_TOKENS, pools, strict=True)
        )
        binding = bind(plan, pair, request, source, target)
        pieces_s.append(seconds_of(partial(copy_binding, binding, *addresses)))
        layer = place % len(memory[0])
        bulk = Binding.bulk(Base(0, layer, 0), Base(0, layer, 0), len(memory[0][layer]))
        bulk_s.append(seconds_of(partial(copy_binding, bulk, *addresses)))
    transport.close()
    num_bytes, num_pieces = binding.size
    bytes_per_s = len(memory[0][0]) / statistics.median(bulk_s)
    rest_s = statistics.median(pieces_s) - num_bytes / bytes_per_s
    return LinkCost(
        descriptor_s=max(rest_s / num_pieces, 0.0),
        bytes_per_s=min(bytes_per_s, num_bytes / statistics.median(pieces_s)),
        copy_bytes_per_s=bytes_per_s,
        maps_peer=True,
    )


def seconds_of(copy: Callable[[], None]) -> float:
    begin = time.perf_counter()
    copy()
    return time.perf_counter() - begin


# ---------------------------------------------------------------- loads


def compare(
    pool: Pool, cost: HandOffCost, limit: float, share: float, args: argparse.Namespace
) -> dict[str, Any]:
    rate = share * limit
    pool.writes()
    began, seconds = pool.run(schedule(rate, args.rooms, args.seed))
    first = int(args.rooms * WARM_UP)
    seen = Seen(*percentiles(seconds[first:]), mean_in_flight(began, seconds, began[first]))
    told = told_by(predict(load_at(rate, args), cost, num_requests=args.rooms, seed=args.seed))
    writes = pool.writes()
    error = Seen(
        told.p50_ms / seen.p50_ms - 1,
        told.p99_ms / seen.p99_ms - 1,
        told.in_flight - seen.in_flight,
    )
    return {
        "share": share,
        "rooms_per_s": rate,
        "measured": seen._asdict(),
        "predicted": told._asdict(),
        "p50_error": error.p50_ms,
        "p99_error": error.p99_ms,
        "in_flight_error": error.in_flight,
        "write_ms": {"p50": 1e3 * statistics.median(writes), "mean": 1e3 * statistics.mean(writes)},
        "within_bars": abs(error.in_flight) <= 1 and abs(error.p50_ms) <= 0.3,
    }


def load_at(rate: float, args: argparse.Namespace) -> ServingLoad:
    """Return a load of hand-offs alone: prefill and decode take no time."""
    num_prefill, num_decode = map(int, args.instances.split("x"))
    return ServingLoad(
        requests_per_s=rate,
        num_input=NUM_TOKENS,
        num_output=1,
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_tokens_per_s=1e12,
        token_s=1e-9,
        cache_tokens=1 << 40,
    )


def told_by(one: LoadPrediction) -> Seen:
    return Seen(1e3 * one.added_s.p50, 1e3 * one.added_s.p99, one.in_flight)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(seconds, (50, 99))
    return 1e3 * float(p50), 1e3 * float(p99)


def mean_in_flight(times: list[float], seconds: list[float], begin: float) -> float:
    """Return the mean number of rooms in flight from ``begin`` until the last one begins."""
    end = times[-1]
    covered = [min(at + s, end) - max(at, begin) for at, s in zip(times, seconds, strict=True)]
    return sum(max(0.0, one) for one in covered) / (end - begin)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
