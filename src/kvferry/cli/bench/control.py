"""``kvferry bench control``: rooms of one page, which measure messages and threads."""

from __future__ import annotations

import argparse
import itertools
import statistics

import msgspec
from rich.console import Console
from rich.table import Table

from kvferry.cli.needs import demand_transport
from kvferry.cli.parsing import show, whole
from kvferry.cli.printing import print_document
from kvferry.endpoint.config import EndpointConfig, ProofMode
from kvferry.errors import InputError
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import Request
from kvferry.regions import Device
from kvferry.testing.fleet import Fleet, FleetSide

PAGE_TOKENS = 16
MAX_CONCURRENCY = 1024
# Makes room ids unique.
SERIES = itertools.count()


class ControlLevel(msgspec.Struct):
    """The measurements at one concurrency."""

    concurrency: int
    rooms: int
    rooms_per_s: float
    p50_ms: float
    p99_ms: float
    source_cpu_ms: float
    target_cpu_ms: float


def run(args: argparse.Namespace) -> int:
    """Measure every concurrency and print the levels."""
    levels = [whole("--concurrency")(text) for text in args.concurrency.split(",")]
    if max(levels) > MAX_CONCURRENCY:
        raise InputError(
            f"--concurrency must be at most {MAX_CONCURRENCY}, not {show(args.concurrency)}"
        )
    device = Device.parse(args.device)
    demand_transport(args.transport)
    rooms = whole("--rooms")(args.rooms)
    proof = ProofMode(args.proof or ProofMode.SAMPLED)
    measured = measure(levels, rooms, args.transport, str(device), proof, tell=not args.json)
    if args.json:
        asked = {"transport": args.transport, "device": str(device), "proof": str(proof)}
        print_document(asked | {"levels": msgspec.to_builtins(measured)})
    else:
        _print(measured)
    return 0


def measure(
    levels: list[int],
    num_rooms: int,
    transport: str,
    device: str,
    proof: ProofMode = ProofMode.SAMPLED,
    *,
    tell: bool,
) -> list[ControlLevel]:
    """Measure one source process and one target process at each concurrency."""
    spec = attention(layers=2, kv_heads=2, head_dim=64)
    layout = Layout(spec, Parallel(), page_tokens=PAGE_TOKENS)
    config = EndpointConfig(proof=proof)
    num_pages = 2 * max(levels) + 2
    sides = [FleetSide(name, layout, num_pages, config) for name in ("prefill", "decode")]
    status = Console(stderr=True, quiet=not tell)
    started = status.status("starting two processes")
    with started, Fleet(*sides, transport=transport, device=device) as fleet:
        fleet.carry("first", Request(PAGE_TOKENS), seed=0)
        return [timed_level(fleet, level, max(num_rooms, 2 * level)) for level in levels]


def timed_level(fleet: Fleet, concurrency: int, num_rooms: int) -> ControlLevel:
    """Run the rooms of one concurrency; the target times each of them."""
    source, target = fleet.sources[0], fleet.targets["decode"][0]
    before = [rank.ask("cpu_s") for rank in (source, target)]
    series = next(SERIES)
    source.begin("serve_rooms", series, num_rooms, concurrency)
    target.begin("ask_rooms", fleet.prefill.name, series, num_rooms, concurrency)
    seconds, total_s = target.answer(300.0)
    source.answer(300.0)
    after = [rank.ask("cpu_s") for rank in (source, target)]
    cpu_ms = [1e3 * (b - a) / num_rooms for a, b in zip(before, after, strict=True)]
    ordered = sorted(1e3 * s for s in seconds)
    return ControlLevel(
        concurrency,
        num_rooms,
        num_rooms / total_s,
        statistics.median(ordered),
        ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        *cpu_ms,
    )


def _print(levels: list[ControlLevel]) -> None:
    table = Table(box=None)
    for name in ("at once", "rooms", "rooms/s", "p50 ms", "p99 ms", "CPU ms a room"):
        table.add_column(name, justify="right")
    for level in levels:
        table.add_row(
            str(level.concurrency),
            str(level.rooms),
            f"{level.rooms_per_s:.0f}",
            f"{level.p50_ms:.2f}",
            f"{level.p99_ms:.2f}",
            f"{level.source_cpu_ms:.2f} + {level.target_cpu_ms:.2f}",
        )
    Console().print(table)
