"""Compare ``kvferry plan --load`` with hand-offs that really happen at random times.

    .venv/bin/python benchmarks/capacity.py --transport nixl

One prefill and one decode process carry rooms that begin at random (Poisson) times, at a low, a
middle and a high share of what the link can carry. The prediction uses the cost that the endpoint
measured, scaled by one factor: the time of a room alone, measured in the same run, against the
predicted one. Every byte is checked in the first room, and every room must end well. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvferry import (
    DiscoveryServer,
    Layout,
    SourceEndpoint,
    TargetEndpoint,
    attention,
    digest_of,
    make_transport,
)
from kvferry.layout import DType, Order
from kvferry.plan import Request, estimate, reshard
from kvferry.plan.capacity import (
    WARM_UP,
    HandOffCost,
    LoadPrediction,
    ServingLoad,
    hand_off_cost,
    predict,
)

PAGE_TOKENS = {"prefill": 16, "decode": 64}
NUM_TOKENS = 1024
# Rooms that can be in flight at once; a higher number is a backlog that never ends.
NUM_ROOMS_AT_ONCE = 24
SHARES = (0.3, 0.6, 0.85)
# Rooms that begin one after the other, so that each is alone, and rooms that begin at once.
NUM_ALONE, ALONE_S, NUM_AT_ONCE = 40, 0.15, 96
DIGEST = digest_of(range(NUM_TOKENS), model="m", dtype="bf16")
START_S, ROOM_S = 2.0, 120.0


class Seen(NamedTuple):
    """Measured or predicted effects of a load."""

    p50_ms: float
    p99_ms: float
    in_flight: float


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


def pages_of(side: str, place: int) -> list[int]:
    """Return the pages of a room's place; no two are adjacent."""
    num_pages = NUM_TOKENS // PAGE_TOKENS[side]
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
                prefix, begin, times = pipe.recv()
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
                        tokens=NUM_TOKENS,
                        pages=pages_of("decode", i % NUM_ROOMS_AT_ONCE),
                        digest=DIGEST,
                        deadline_s=ROOM_S,
                    )
                )
                handles[-1].on_end(functools.partial(note_end, done, i))
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
    pipe: Connection, source: SourceEndpoint, prefix: str, times: list[float]
) -> tuple[list[float], int]:
    """Carry rooms that begin at these times; return the seconds of each, and a checksum."""
    begin = time.monotonic() + START_S
    pipe.send((prefix, begin, times))
    for i, at in enumerate(times):
        wait_until(begin + at)
        room = source.open(f"{prefix}-{i}", deadline_s=ROOM_S)
        room.push((0, NUM_TOKENS), pages_of("prefill", i % NUM_ROOMS_AT_ONCE))
        room.close(digest=DIGEST)
    done, failures, checksum = pipe.recv()
    if failures:
        raise SystemExit(f"{len(failures)} rooms failed: {failures[0]}")
    return [end - begin - at for end, at in zip(done, times, strict=True)], int(checksum)


def measure(pipe: Connection, url: str, args: argparse.Namespace) -> dict[str, Any]:
    transport, layout, kv = pools_of("prefill", args)
    kv[:] = np.random.default_rng(0).integers(0, 1 << 16, kv.shape, dtype=np.uint16)
    pools = {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}
    options = {"name": "prefill", "model": "m", "transport": transport, "discovery": url}
    with SourceEndpoint(layout, pools, **options) as source:
        _, checksum = run_rooms(pipe, source, "first", [0.0])
        if checksum != int(kv[:, :, pages_of("prefill", 0)].sum()):
            raise SystemExit("the first room arrived with other bytes")
        alone, _ = run_rooms(pipe, source, "alone", [i * ALONE_S for i in range(NUM_ALONE)])
        at_once, _ = run_rooms(pipe, source, "at once", [0.0] * NUM_AT_ONCE)
        cost = hand_off_cost(
            estimate(
                reshard(layout, layout_of("decode", args.layers)),
                Request(NUM_TOKENS),
                source.link_cost,
            )
        )
        scale = statistics.median(alone) / cost.alone_s
        scaled = cost._replace(
            alone_s=cost.alone_s * scale,
            send_s=cost.send_s * scale,
            receive_s=cost.receive_s * scale,
        )
        limit = 1 / max(scaled.send_s, scaled.receive_s)
        rows = [compare(pipe, source, scaled, limit, share, args) for share in SHARES]
    return {
        "transport": args.transport,
        "room_bytes": cost.num_bytes,
        "staged": cost.is_staged,
        "alone_ms": 1e3 * statistics.median(alone),
        "predicted_alone_ms": 1e3 * cost.alone_s,
        "limit_rooms_per_s": limit,
        "measured_limit_rooms_per_s": NUM_AT_ONCE / max(at_once),
        "loads": rows,
        "within_bars": all(row["within_bars"] for row in rows),
    }


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
