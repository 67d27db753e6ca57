"""Compare ``kvferry plan --load`` with hand-offs that really happen at random times.

    .venv/bin/python benchmarks/capacity.py --transport shm

One prefill and one decode process carry rooms that begin at random (Poisson) times, at a low, a
middle and a high share of what the link can carry. The prediction knows when rooms begin and two
measured costs, none of them from such rooms: of a write, by the endpoint when it connects, or for a
transport that maps the peer by copies of a request's pages in one process; and of messages, by
rooms of one page that begin one after the other. Every byte is checked in the first room, and every
room must end well. The last line is JSON; the exit
status is 1 if at one load the hand-offs in flight are predicted wrong by more than 1, or the median
by more than 30 %.
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
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from kvferry import (
    DiscoveryServer,
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
    ServingLoad,
    hand_off_cost,
    predict,
)
from kvferry.plan.choose import shape_of
from kvferry.plan.places import Base, PageTable, contiguous_pools
from kvferry.telemetry.observer import ObservedWrite, Observer

PAGE_TOKENS = {"prefill": 16, "decode": 64}
NUM_TOKENS = 1024
# Rooms that can be in flight at once; a higher number is a backlog that never ends.
NUM_ROOMS_AT_ONCE = 24
SHARES = (0.3, 0.6, 0.85)
# Rooms that begin one after the other, so that each is alone, and rooms that begin at once.
NUM_ALONE, ALONE_S, NUM_AT_ONCE = 40, 0.1, 96
START_S, ROOM_S = 2.0, 120.0


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
    with DiscoveryServer() as server:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        other = context.Process(target=decode, args=(there, server.url, args))
        other.start()
        try:
            document = measure(here, server.url, args)
        finally:
            here.close()
            other.join(30.0)
    print_table(document)
    print(json.dumps(document))
    return 0 if document["within_bars"] else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--layers", type=int, default=16, help="16 layers are 64 MiB a room")
    parser.add_argument("--rooms", type=int, default=600, help="rooms of each load")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# ---------------------------------------------------------------- the two processes


def pools_of(side: str, args: argparse.Namespace) -> tuple[Any, Layout, Any]:
    """Return a transport, a layout and its memory, with pages for all rooms at once."""
    layout, transport = layout_of(side, args.layers), make_transport(args.transport)
    pages = NUM_ROOMS_AT_ONCE * NUM_TOKENS // PAGE_TOKENS[side]
    inner = (PAGE_TOKENS[side], 8, 128) if side == "prefill" else (8, PAGE_TOKENS[side], 128)
    shape = (args.layers, 2, pages, *inner)
    kv = transport.allocate(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
    return transport, layout, kv


@functools.cache
def digest(num_tokens: int) -> bytes:
    return digest_of(range(num_tokens), model="m", dtype="bf16")


def pages_of(side: str, place: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the pages of a room's place; no two are adjacent."""
    num_pages = num_tokens // PAGE_TOKENS[side]
    return [place + NUM_ROOMS_AT_ONCE * i for i in range(num_pages)]


def schedule(rate: float, num_rooms: int, seed: int) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_rooms)
    return [float(at) for at in np.cumsum(gaps)]


def decode(pipe: Connection, url: str, args: argparse.Namespace) -> None:
    """Receive rooms at given times; answer with when each was done."""
    transport, layout, kv = pools_of("decode", args)
    pools = {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}
    options = {"name": "decode", "model": "m", "transport": transport, "discovery": url}
    with TargetEndpoint(layout, pools, **options) as target:
        while True:
            try:
                prefix, begin, times, num_tokens = pipe.recv()
            except EOFError:
                return
            done: list[float] = [0.0] * len(times)
            handles = []
            for i, at in enumerate(times):
                wait_until(begin + at)
                handles.append(
                    target.receive(
                        f"{prefix}-{i}",
                        prefill="prefill",
                        tokens=num_tokens,
                        pages=pages_of("decode", i % NUM_ROOMS_AT_ONCE, num_tokens),
                        digest=digest(num_tokens),
                        deadline_s=ROOM_S,
                    )
                )
                handles[-1].on_end(partial(note_end, done, i))
            for handle in handles:
                handle.wait(ROOM_S)
            first = kv[:, :, pages_of("decode", 0)].transpose(0, 1, 2, 4, 3, 5)
            pipe.send((done, [str(one.failure) for one in handles if one.failure], first.sum()))


def note_end(done: list[float], i: int, outcome: object) -> None:
    done[i] = time.monotonic()


def wait_until(when: float) -> None:
    while (left := when - time.monotonic()) > 0:
        time.sleep(left)


def run_rooms(
    pipe: Connection,
    source: SourceEndpoint,
    prefix: str,
    times: list[float],
    num_tokens: int = NUM_TOKENS,
) -> tuple[list[float], int]:
    """Carry rooms that begin at these times; return the seconds of each, and a checksum."""
    begin = time.monotonic() + START_S
    pipe.send((prefix, begin, times, num_tokens))
    for i, at in enumerate(times):
        wait_until(begin + at)
        room = source.open(f"{prefix}-{i}", deadline_s=ROOM_S)
        room.push((0, num_tokens), pages_of("prefill", i % NUM_ROOMS_AT_ONCE, num_tokens))
        room.close(digest=digest(num_tokens))
    done, failures, checksum = pipe.recv()
    if failures:
        raise SystemExit(f"{len(failures)} rooms failed: {failures[0]}")
    return [end - begin - at for end, at in zip(done, times, strict=True)], int(checksum)


def measure(pipe: Connection, url: str, args: argparse.Namespace) -> dict[str, Any]:
    transport, layout, kv = pools_of("prefill", args)
    kv[:] = np.random.default_rng(0).integers(0, 1 << 16, kv.shape, dtype=np.uint16)
    copied = measured_copies(args) if transport.maps_peer else None
    pools = {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}
    writes = Writes()
    options = {"name": "prefill", "model": "m", "transport": transport, "discovery": url}
    with SourceEndpoint(layout, pools, observer=writes, **options) as source:
        _, checksum = run_rooms(pipe, source, "first", [0.0])
        if checksum != int(kv[:, :, pages_of("prefill", 0)].sum()):
            raise SystemExit("the first room arrived with other bytes")
        # Touches every page, which takes longer than later writes.
        run_rooms(pipe, source, "warm", [0.0] * (2 * NUM_ROOMS_AT_ONCE))
        plan = reshard(layout, layout_of("decode", args.layers))
        link = with_messages(pipe, source, plan, copied or source.link_cost)
        cost = hand_off_cost(estimate(plan, Request(NUM_TOKENS), link))
        limit = 1 / max(cost.send_s, cost.receive_s)
        # What follows is not known to the prediction. The times of writes say where it is wrong.
        rows = []
        for share in SHARES:
            writes.seconds.clear()
            rows.append(compare(pipe, source, cost, limit, share, args))
            rows[-1]["write_ms"] = 1e3 * statistics.median(writes.seconds)
        alone, _ = run_rooms(pipe, source, "alone", [i * ALONE_S for i in range(NUM_ALONE)])
        at_once, _ = run_rooms(pipe, source, "at once", [0.0] * NUM_AT_ONCE)
    return {
        "transport": args.transport,
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


def with_messages(pipe: Connection, source: SourceEndpoint, plan: Plan, link: LinkCost) -> LinkCost:
    """Return a link's cost with the seconds that a room of one page takes beside its write."""
    num_tokens = max(PAGE_TOKENS.values())
    times = [i * ALONE_S for i in range(NUM_ALONE)]
    seconds, _ = run_rooms(pipe, source, "one page", times, num_tokens)
    write_s = hand_off_cost(estimate(plan, Request(num_tokens), link)).send_s
    return replace(link, room_s=max(statistics.median(seconds) - write_s, 0.0))


def measured_copies(args: argparse.Namespace) -> LinkCost:
    """Return the costs of writes into mapped memory, from copies in this process.

    Copies a request's pages as a write does, and as many bytes in one piece. The medians give the
    cost of a piece and of a byte.
    """
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
    pieces_s, bulk_s, shape = [], [], None
    for place in (*range(NUM_ROOMS_AT_ONCE), *range(NUM_ROOMS_AT_ONCE)):
        tables = [{"kv": PageTable(pages_of(side, place))} for side in ("prefill", "decode")]
        views = [PagedView(one.map, table) for one, table in zip(pools, tables, strict=True)]
        binding = bind(plan, pair, request, *views)
        shape = shape_of(binding)
        pieces_s.append(seconds_of(partial(copy_binding, binding, *addresses)))
        layer = place % len(memory[0])
        bulk = Binding.bulk(Base(0, layer, 0), Base(0, layer, 0), len(memory[0][layer]))
        bulk_s.append(seconds_of(partial(copy_binding, bulk, *addresses)))
    transport.close()
    num_bytes = shape.num_bytes
    bytes_per_s = len(memory[0][0]) / statistics.median(bulk_s)
    rest_s = statistics.median(pieces_s) - num_bytes / bytes_per_s
    return LinkCost(
        descriptor_s=max(rest_s / shape.slices, 0.0),
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
    pipe: Connection,
    source: SourceEndpoint,
    cost: HandOffCost,
    limit: float,
    share: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    rate = share * limit
    times = schedule(rate, args.rooms, args.seed)
    seconds, _ = run_rooms(pipe, source, f"load{share}", times)
    first = int(args.rooms * WARM_UP)
    seen = Seen(*percentiles(seconds[first:]), mean_in_flight(times, seconds, times[first]))
    told = told_by(predict_at(cost, rate, args))
    print(f"{share:.0%} of {limit:.1f} rooms/s: measured {seen}, predicted {told}", file=sys.stderr)
    return {
        "share": share,
        "rooms_per_s": rate,
        "measured": seen._asdict(),
        "predicted": told._asdict(),
        "within_bars": abs(seen.in_flight - told.in_flight) <= 1
        and abs(seen.p50_ms - told.p50_ms) <= 0.3 * seen.p50_ms,
    }


def predict_at(cost: HandOffCost, rate: float, args: argparse.Namespace) -> LoadPrediction:
    """Predict hand-offs alone, at the times of ``schedule``: prefill and decode take no time."""
    load = ServingLoad(
        requests_per_s=rate,
        num_input=NUM_TOKENS,
        num_output=1,
        num_prefill=1,
        num_decode=1,
        prefill_tokens_per_s=1e12,
        token_s=1e-9,
        cache_tokens=1 << 40,
    )
    return predict(load, cost, num_requests=args.rooms, seed=args.seed)


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


def print_table(document: dict[str, Any]) -> None:
    print(f"a room alone: {document['alone_ms']:.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
