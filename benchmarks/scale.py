"""Costs of many instances: discovery, the links of one endpoint, and a router before many workers.

    .venv/bin/python benchmarks/scale.py --quick --json

Services, the measured endpoint and the router are real processes; their CPU and memory come from
``/proc``. Ranks, peers and workers are simulated in this process or in one helper, because as many
processes do not fit on a machine. Every quantity is measured at several sizes. An exponent is the
slope of its logarithm over that of the size: 1 is linear growth. A bar fails if an endpoint, a
service or the router grows faster than linearly, or if a rank that renews is lost. The last line
is JSON; the exit status is 1 if a bar fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The parts of this benchmark, and the etcd cluster and the fake workers of the tests.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.scaling.links import (
    measure_source,
    measure_target,
    run_links,
    serve_source,
    serve_target,
)
from benchmarks.scaling.measuring import Result, say
from benchmarks.scaling.registrations import run_discovery
from benchmarks.scaling.router import run_router, serve_workers
from kvferry.http.limits import raise_open_files

PARTS = ("http", "etcd", "source", "target", "router")
LINKS = [100, 300, 1000]
ETCD, ETCD_QUICK = [125, 500, 2000], [60, 180, 540]


def main() -> int:
    args = arguments()
    if args.serve_source:
        serve_source()
        return 0
    if args.serve_target:
        serve_target()
        return 0
    if args.serve_workers:
        asyncio.run(serve_workers(args.serve_workers))
        return 0
    raise_open_files()
    window_s = 3.0 if args.quick else 10.0
    work: dict[str, Callable[[], Result]] = {
        "http": lambda: run_discovery("http", [125, 500, 2000], window_s),
        "etcd": lambda: run_discovery("etcd", ETCD_QUICK if args.quick else ETCD, window_s),
        "source": lambda: run_links("source", measure_source, LINKS, window_s),
        "target": lambda: run_links("target", measure_target, LINKS, window_s),
        "router": lambda: run_router([20, 60, 200], window_s),
    }
    begin, results = time.monotonic(), {}
    for part in args.parts.split(","):
        say(f"--- {part}, {time.monotonic() - begin:.0f} s so far")
        results[part] = work[part]()
    bars = [bar for result in results.values() for bar in result["bars"]]
    for bar in bars:
        verdict = "holds" if bar["holds"] else "FAILS"
        say(f"{verdict}: {bar['bar']} ({bar['value']}, limit {bar['limit']})")
    holds = all(bar["holds"] for bar in bars)
    document = {
        "quick": args.quick,
        "seconds": round(time.monotonic() - begin, 1),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "holds": holds,
        "parts": results,
    }
    print(json.dumps(document))
    return 0 if holds else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter, in under 3 minutes")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--json", action="store_true", help="accepted as everywhere: JSON is last")
    parser.add_argument("--serve-source", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve-target", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve-workers", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
