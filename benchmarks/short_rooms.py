"""Many short rooms between more busy processes than cores, to find waits that do not end.

    .venv/bin/python benchmarks/short_rooms.py --rounds 5 --rooms 60

3 → 9 and 9 → 3 ranks over every transport, with new processes in each round. A wait that does not
end makes a room take as long as its deadline, so a room is a problem if it fails or takes longer
than ``SLOW_S``. Every byte is checked. The last line is JSON; the exit status is 1 if there was a
problem.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import Request
from kvferry.testing.fleet import Fleet, FleetSide, RankError

# 9 ranks hold 3 heads three times, as in a room that once hung.
SPEC = attention(layers=2, kv_heads=3, head_dim=16)
PAGE, TOKENS = 8, 40
PAIRS = ((3, 9), (9, 3))
TRANSPORTS = ("shm", "nixl", "mooncake")
SLOW_S = 20.0


def main() -> int:
    args = arguments()
    total: dict[str, Any] = {"fleets": 0, "rooms": 0, "slowest_s": 0.0, "problems": []}
    for number in range(args.rounds):
        for transport in args.transport.split(","):
            for pair in PAIRS:
                run_rooms(pair, transport, args.rooms, total)
                print(
                    f"round {number + 1} of {args.rounds}: {transport} {pair[0]} → {pair[1]}, "
                    f"{total['rooms']} rooms so far, slowest {total['slowest_s']:.2f} s, "
                    f"{len(total['problems'])} problems",
                    file=sys.stderr,
                    flush=True,
                )
    print(json.dumps(total))
    return 1 if total["problems"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rooms", type=int, default=40)
    parser.add_argument("--transport", default=",".join(TRANSPORTS))
    return parser.parse_args()


def run_rooms(pair: tuple[int, int], transport: str, num_rooms: int, total: dict[str, Any]) -> None:
    """Run rooms one after another in a new fleet, and add the results to ``total``."""
    source, target = (Layout(SPEC, Parallel(tp=tp), page_tokens=PAGE) for tp in pair)
    pages = 2 * (TOKENS // PAGE)
    total["fleets"] += 1
    sides = FleetSide("prefill", source, pages), FleetSide("decode", target, pages)
    with Fleet(*sides, transport=transport) as fleet:
        for number in range(num_rooms):
            begin = time.monotonic()
            try:
                fleet.carry(f"room-{number}", Request(TOKENS), seed=number)
            except RankError as error:
                total["problems"].append(f"{transport} {pair}: {error}")
                return
            total["rooms"] += 1
            seconds = time.monotonic() - begin
            total["slowest_s"] = max(total["slowest_s"], seconds)
            if seconds > SLOW_S:
                total["problems"].append(f"{transport} {pair}: room {number} took {seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
