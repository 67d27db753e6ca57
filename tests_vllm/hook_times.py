"""Engine steps and milliseconds in the hooks of kvferry and of vLLM's NixlConnector.

Prompts and requests are those of ``compare.py``; the workers run in the engines' processes, as on a
GPU. For prefill and decode it prints medians over the requests: from a request's arrival at the
connector to its end, the steps, the milliseconds in hooks, and the CPU milliseconds of the process
outside of its main thread. Ends in one JSON line.

Usage: python -m tests_vllm.hook_times [--repeats N] [--transport NAME] [--tokens N]
    [--connector NAME ...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from tests_vllm.compare import Pair, Way, at_once, in_turn, prompt_of, started
from tests_vllm.servers import Deployment, Json, log, timed

WAYS: dict[str, dict[str, Way]] = {
    "KVFerryConnector": {"in turn": in_turn, "at once": at_once},
    "NixlConnector": {"in turn": in_turn},
}
# Hooks whose median is below this are left out of the table.
SHOWN_MS = 0.02


def lines_of(path: Path) -> list[Json]:
    """Return the sums of requests, in order."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["part"] == "request"]


def medians(lines: list[Json]) -> Json:
    hooks = sorted({hook for line in lines for hook in line["hook_ms"]})
    by_hook = {h: median(line["hook_ms"].get(h, 0.0) for line in lines) for h in hooks}
    whole = ("ms", "steps", "threads_cpu_ms")
    return {
        **{name: round(median(line[name] for line in lines), 2) for name in whole},
        "all_hooks_ms": round(median(sum(line["hook_ms"].values()) for line in lines), 2),
        "hook_ms": {h: round(ms, 3) for h, ms in by_hook.items() if ms >= SHOWN_MS},
    }


def measured(pair: Pair, way: Way, times: Path, tokens: int, repeats: int) -> Json:
    """Send prompts one at a time, and return the medians of prefill and decode."""
    sides = ("prefill", "decode")
    way(pair, prompt_of(tokens, 0))  # also connects
    before = {side: len(lines_of(times / side)) for side in sides}
    first_s = []
    for number in range(1, repeats + 1):
        first_s.append(way(pair, prompt_of(tokens, number)).first_s)
    rows: Json = {side: medians(lines_of(times / side)[before[side] :]) for side in sides}
    return {"first_token_ms": round(1e3 * median(first_s), 1)} | rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--tokens", type=int, default=113)
    parser.add_argument("--connector", choices=WAYS, action="append", help="default: both")
    asked = parser.parse_args()
    found: Json = {}
    for connector in asked.connector or WAYS:
        with Deployment() as deployment, tempfile.TemporaryDirectory() as folder:
            times = Path(folder)
            with timed(f"prefill and decode with {connector}"):
                pair = started(deployment, connector, asked.transport, times)
            for name, way in WAYS[connector].items():
                row = measured(pair, way, times, asked.tokens, asked.repeats)
                found[f"{connector}, {name}"] = row
                log(f"{connector}, {name}: {json.dumps(row, indent=1)}")
    told = {"tokens": asked.tokens, "repeats": asked.repeats, "medians": found}
    print(json.dumps({"benchmark": "vllm-hook-times"} | told))


if __name__ == "__main__":
    main()
