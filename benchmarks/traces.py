"""Cost of tracing: rooms of one page, with and without traces, in turns.

One pair of processes runs throughout and traces in every other turn, so that other load on the
machine and the pair's memory layout affect both. Ends in one JSON line.

    python benchmarks/traces.py [ROUNDS] [ROOMS] [AT_ONCE] [TRANSPORT]
"""

from __future__ import annotations

import json
import statistics
import sys

from kvferry.cli.bench.control import PAGE_TOKENS, ControlLevel, timed_level
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import Request
from kvferry.testing.fleet import Fleet, FleetSide


def fleet(at_once: int, transport: str) -> Fleet:
    layout = Layout(
        attention(layers=2, kv_heads=2, head_dim=64), Parallel(), page_tokens=PAGE_TOKENS
    )
    sides = [FleetSide(name, layout, 2 * at_once + 2) for name in ("prefill", "decode")]
    return Fleet(*sides, transport=transport)


def turn(pair: Fleet, at_once: int, rooms: int, *, keep: bool) -> ControlLevel:
    pair.all(pair.ranks, "keep_traces", keep)
    # Warm the caches after the change.
    timed_level(pair, at_once, 2 * at_once)
    return timed_level(pair, at_once, rooms)


def main() -> None:
    given, defaults = sys.argv[1:], ("100", "600", "32", "shm")
    rounds, rooms, at_once, transport = (*given, *defaults[len(given) :])
    measure(int(rounds), int(rooms), int(at_once), transport)


def measure(rounds: int, rooms: int, at_once: int, transport: str) -> None:
    levels: dict[bool, list[ControlLevel]] = {True: [], False: []}
    with fleet(at_once, transport) as pair:
        pair.carry("first", Request(PAGE_TOKENS), seed=0)
        timed_level(pair, at_once, 5 * rooms)
        for number in range(rounds):
            for keep in (True, False) if number % 2 else (False, True):
                levels[keep].append(turn(pair, at_once, rooms, keep=keep))
    document = {name: medians(levels[keep]) for name, keep in (("with", True), ("without", False))}
    both = list(zip(levels[True], levels[False], strict=True))
    slower = statistics.median(1 - a.rooms_per_s / b.rooms_per_s for a, b in both)
    more_cpu = statistics.median(cpu_us(a) / cpu_us(b) - 1 for a, b in both)
    more_us = statistics.median(cpu_us(a) - cpu_us(b) for a, b in both)
    document["cost"] = {
        "rooms_per_s": round(slower, 4),
        "cpu": round(more_cpu, 4),
        "cpu_us_a_room": round(more_us, 1),
    }
    asked = {"rounds": rounds, "rooms": rooms, "at_once": at_once, "transport": transport}
    print(json.dumps(asked | document))


def cpu_us(level: ControlLevel) -> float:
    return 1e3 * (level.source_cpu_ms + level.target_cpu_ms)


def medians(levels: list[ControlLevel]) -> dict[str, float]:
    source_ms = statistics.median(level.source_cpu_ms for level in levels)
    target_ms = statistics.median(level.target_cpu_ms for level in levels)
    return {
        "rooms_per_s": round(statistics.median(level.rooms_per_s for level in levels), 1),
        "source_cpu_us_a_room": round(1e3 * source_ms, 1),
        "target_cpu_us_a_room": round(1e3 * target_ms, 1),
    }


if __name__ == "__main__":
    main()
