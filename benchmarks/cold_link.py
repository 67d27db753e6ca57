"""How long the first room of a pair takes, from first contact to its bytes, and what that is.

    .venv/bin/python benchmarks/cold_link.py --transport nixl --pairs 5

Each pair is two new processes. The prefill's room is open and pushed before decode asks for it, so
the time is that of the cold link: finding the instance, the handshake, reaching the memory, and
the first write. The second room tells what a warm link takes. Both clocks are the machine's
monotonic one. Every byte is compared. The last line is JSON; the exit status is 1 if the median of
the first rooms is above ``--limit``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvferry import (
    DiscoveryServer,
    Layout,
    Parallel,
    SourceEndpoint,
    TargetEndpoint,
    attention,
)
from kvferry.ids import Peer
from kvferry.protocol.messages import Envelope, Hello, Offer, Welcome
from kvferry.telemetry.observer import ObservedWrite, Observer

TOKENS, PAGE_TOKENS, HEADS, HEAD_DIM = 512, 16, 8, 128
NUM_PAGES = TOKENS // PAGE_TOKENS
LIMIT_S, ROOM_S = 0.5, 60.0
LAYOUT = Layout(
    attention(layers=4, kv_heads=HEADS, head_dim=HEAD_DIM), Parallel(), page_tokens=PAGE_TOKENS
)
# Each step ends at the mark that it names, in the order of a first room.
STEPS = (
    "asked",
    "hello sent",  # the instance was found
    "hello received",  # the control channel is connected
    "memory reached",  # the target's transport metadata is loaded
    "welcome sent",
    "welcome received",
    "offer received",
    "first write ended",  # the data connection is open
    "done",
)


class Marks(Observer):
    """When each step of the first room was seen."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.times.setdefault(name, time.monotonic())

    def frame_out(self, peer: Peer, envelope: Envelope) -> None:
        names: dict[type, str] = {Hello: "hello sent", Welcome: "welcome sent"}
        if name := names.get(type(envelope.body)):
            self.mark(name)

    def frame_in(self, envelope: Envelope) -> None:
        names: dict[type, str] = {
            Hello: "hello received",
            Welcome: "welcome received",
            Offer: "offer received",
        }
        if name := names.get(type(envelope.body)):
            self.mark(name)

    def link_up(self, peer: Peer, transport: str) -> None:
        self.mark("memory reached")

    def write(self, job: ObservedWrite, at: float) -> None:
        self.times.setdefault("first write ended", at)


def pools_of(device: str, fill: bool) -> tuple[Any, dict[str, Any]]:
    """Return K and V in one tensor, and the pools of an endpoint."""
    shape = (LAYOUT.spec.num_layers, 2, NUM_PAGES, PAGE_TOKENS, HEADS, HEAD_DIM)
    kv = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if fill:
        kv.uniform_(-1, 1)
    return kv, {"kv": {"k": kv[:, 0], "v": kv[:, 1]}}


def run_prefill(pipe: Connection, url: str, name: str, args: argparse.Namespace) -> None:
    """Push each room that the pipe names, and answer with marks and a checksum."""
    marks = Marks()
    kv, pools = pools_of(args.device, fill=True)
    options: dict[str, Any] = {"name": name, "model": "m", "discovery": url, "observer": marks}
    with SourceEndpoint(LAYOUT, pools, transport=args.transport, **options) as source:
        pipe.send(None)
        while room := pipe.recv():
            handle = source.open(room, deadline_s=ROOM_S)
            handle.push((0, TOKENS), range(NUM_PAGES))
            handle.close()
            pipe.send("pushed")
            handle.wait(ROOM_S)
            pipe.send((marks.times, checksum(kv)))


def run_decode(
    pipe: Connection, url: str, name: str, prefill: str, args: argparse.Namespace
) -> None:
    """Receive each room that the pipe names, and answer with its seconds, marks and checksum."""
    marks = Marks()
    kv, pools = pools_of(args.device, fill=False)
    options: dict[str, Any] = {"name": name, "model": "m", "discovery": url, "observer": marks}
    with TargetEndpoint(LAYOUT, pools, transport=args.transport, **options) as target:
        pipe.send(None)
        while room := pipe.recv():
            begin = time.monotonic()
            pages = range(NUM_PAGES)
            handle = target.receive(room, prefill=prefill, tokens=TOKENS, pages=pages)
            handle.wait(ROOM_S)
            end = time.monotonic()
            if handle.failure:
                raise SystemExit(f"{room} failed: {handle.failure}")
            times = {"asked": begin, "done": end}
            pipe.send((end - begin, marks.times | times, checksum(kv)))


def checksum(kv: Any) -> int:
    return int(kv.view(torch.int16).long().sum())


def measure(number: int, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Carry a first room and a second one between two new processes."""
    context = multiprocessing.get_context("spawn")
    prefill_name, decode_name = f"prefill-{number}", f"decode-{number}"
    ours, theirs = zip(context.Pipe(), context.Pipe(), strict=True)
    processes = [
        context.Process(target=run_prefill, args=(theirs[0], url, prefill_name, args)),
        context.Process(target=run_decode, args=(theirs[1], url, decode_name, prefill_name, args)),
    ]
    for process in processes:
        process.start()
    for pipe in theirs:
        pipe.close()
    prefill, decode = ours
    prefill.recv()
    decode.recv()
    seconds = {}
    for room in ("first", "second"):
        prefill.send(room)
        prefill.recv()
        decode.send(room)
        seconds[room], target_times, received = decode.recv()
        source_times, sent = prefill.recv()
        if received != sent:
            raise SystemExit(f"the {room} room arrived with other bytes")
        if room == "first":
            steps = durations(target_times | source_times)
    for pipe, process in zip(ours, processes, strict=True):
        pipe.send(None)
        process.join()
    return {"first_ms": 1e3 * seconds["first"], "second_ms": 1e3 * seconds["second"]} | steps


def durations(times: dict[str, float]) -> dict[str, Any]:
    """Return the milliseconds of each step, which ends at its mark."""
    marks = [name for name in STEPS if name in times]
    return {
        "steps_ms": {
            name: round(1e3 * (times[name] - times[before]), 2)
            for before, name in itertools.pairwise(marks)
        }
    }


def main() -> int:
    args = arguments()
    rows = []
    with DiscoveryServer("127.0.0.1", 0).start() as server:
        for number in range(args.pairs):
            rows.append(measure(number, server.url, args))
            print(f"pair {number + 1} of {args.pairs}: {rows[-1]}", file=sys.stderr, flush=True)
    median_ms = {
        key: round(statistics.median(row[key] for row in rows), 2)
        for key in ("first_ms", "second_ms")
    }
    steps = {
        name: round(statistics.median(row["steps_ms"][name] for row in rows), 2)
        for name in rows[0]["steps_ms"]
    }
    holds = median_ms["first_ms"] <= 1e3 * args.limit
    document = {"transport": args.transport, "device": args.device, **median_ms}
    document |= {"slowest_first_ms": round(max(row["first_ms"] for row in rows), 2)}
    document |= {"steps_ms": steps, "limit_ms": 1e3 * args.limit, "holds": holds}
    print(json.dumps(document | {"load": os.getloadavg(), "cores": os.cpu_count()}))
    return 0 if holds else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for pools on a GPU")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds (0.5)")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
