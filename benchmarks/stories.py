"""What keeping the stories of rooms costs: rooms of one page, with stories and without, in turns.

Two pairs of processes stay up for the whole run, one that keeps stories and one that does not,
and the same load goes to one and the other in turns, so that whatever else the machine does
meets both. Ends in one JSON line.

    python benchmarks/stories.py [ROUNDS] [ROOMS]
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import ExitStack

from kvferry.cli.bench.control import PAGE_TOKENS, timed_level
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import Request
from kvferry.runtime.config import EndpointConfig
from kvferry.testing.fleet import Fleet, FleetSide

CONCURRENCY = 32
KEPT = {"with": EndpointConfig().story_steps, "without": 0}


def fleet(story_steps: int) -> Fleet:
    layout = Layout(
        attention(layers=2, kv_heads=2, head_dim=64), Parallel(), page_tokens=PAGE_TOKENS
    )
    config = EndpointConfig(story_steps=story_steps)
    sides = [
        FleetSide(name, layout, 2 * CONCURRENCY + 2, config=config)
        for name in ("prefill", "decode")
    ]
    return Fleet(*sides, transport="shm")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    rooms = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    rates: dict[str, list[float]] = {"with": [], "without": []}
    cpu_ms: dict[str, list[float]] = {"with": [], "without": []}
    # Whichever pair starts first is slower by several percent, so each does in one half.
    for first in ("with", "without"):
        names = [first, "without" if first == "with" else "with"]
        with ExitStack() as stack:
            fleets = {name: stack.enter_context(fleet(KEPT[name])) for name in names}
            for each in fleets.values():
                each.carry("first", Request(PAGE_TOKENS), seed=0)
                timed_level(each, CONCURRENCY, rooms)
            for turn in range(rounds):
                for name, each in list(fleets.items())[:: 1 if turn % 2 else -1]:
                    level = timed_level(each, CONCURRENCY, rooms)
                    rates[name].append(level.rooms_per_s)
                    cpu_ms[name].append(level.source_cpu_ms + level.target_cpu_ms)
    document = {
        name: {
            "rooms_per_s": round(statistics.median(rates[name]), 1),
            "cpu_us_a_room": round(1e3 * statistics.median(cpu_ms[name]), 1),
            # What else the machine does only adds, so the least is the nearest to the truth.
            "least_cpu_us_a_room": round(1e3 * min(cpu_ms[name]), 1),
        }
        for name in KEPT
    }
    slower = [1 - a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    dearer = [a / b - 1 for a, b in zip(cpu_ms["with"], cpu_ms["without"], strict=True)]
    document["cost"] = {
        "rooms_per_s": round(statistics.median(slower), 4),
        "cpu": round(statistics.median(dearer), 4),
        "least_cpu": round(min(cpu_ms["with"]) / min(cpu_ms["without"]) - 1, 4),
    }
    print(json.dumps({"rounds": rounds, "rooms": rooms, "concurrency": CONCURRENCY, **document}))


if __name__ == "__main__":
    main()
