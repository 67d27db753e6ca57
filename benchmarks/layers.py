"""Time from the end of prefill to Done: whole chunks compared with pushes by layers.

    .venv/bin/python benchmarks/layers.py --transport shm,nixl

Every rank is a process. A stand-in for the model takes a fixed time for each layer (``--slower``
times the time to send a layer) and pushes a prompt of one chunk, whole or ``--group`` layers at a
time. The result is the time from the end of the last layer to Done at the last target. The same run
measures the lower limits: a cache of a single group (``group``), and a prompt that is cached in
full, which takes one control round trip (``control``). The bound is 1.3 times one group's transfer
plus one round trip. Every byte of the last repetition is compared. The last line is JSON; the exit
status is 1 if a byte was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import Request
from kvferry.protocol.outcome import Status
from kvferry.testing.fleet import Fleet, FleetSide

SOURCE_PAGE, TARGET_PAGE = 16, 16
WAIT_S = 60.0


class Shape(NamedTuple):
    """The cache and the sharding of both sides."""

    layers: int
    heads: int
    head_dim: int
    pair: tuple[int, int]
    most_tokens: int

    def sides(self) -> tuple[FleetSide, FleetSide]:
        spec = attention(layers=self.layers, kv_heads=self.heads, head_dim=self.head_dim)
        source, target = (
            Layout(spec, Parallel(tp=tp), page_tokens=page)
            for tp, page in zip(self.pair, (SOURCE_PAGE, TARGET_PAGE), strict=True)
        )
        return (
            FleetSide("prefill", source, self.most_tokens // SOURCE_PAGE + 1),
            FleetSide("decode", target, self.most_tokens // TARGET_PAGE + 1),
        )


def main() -> int:
    args = arguments()
    sizes = [int(text) for text in args.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    for transport in args.transport.split(","):
        for text in args.pairs.split(","):
            first, second = (int(tp) for tp in text.split(":"))
            rows += compare(args, transport, (first, second), sizes)
    good = all(row["verified"] for row in rows)
    print(json.dumps({"layers": args.layers, "group": args.group, "rows": rows}))
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="shm,nixl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", default="2:2,2:1", help="tensor-parallel sizes, as in 2:1,4:8")
    parser.add_argument("--tokens", default="1024,4096,8192,32768")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--slower", type=float, default=1.2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def compare(
    args: argparse.Namespace, transport: str, pair: tuple[int, int], sizes: list[int]
) -> list[dict[str, Any]]:
    """Measure all sizes with two fleets: one of the whole cache, one of a single group."""
    shape = Shape(args.layers, args.heads, args.head_dim, pair, max(sizes))
    rows = []
    with Fleet(*shape.sides(), transport=transport, device=args.device) as fleet:
        series = RoomSeries(fleet, args.repeat)
        series.measure(min(sizes), 0.0, args.layers, verify=False)
        for tokens in sizes:
            # The first touches all memory, the second sets the time of a layer.
            series.measure(tokens, 0.0, args.layers, verify=False)
            rough, _ = series.measure(tokens, 0.0, args.layers, verify=False)
            layer_s = args.slower * rough / args.layers
            whole, right = series.measure(tokens, layer_s, args.layers, verify=True)
            by_layers, right_too = series.measure(tokens, layer_s, args.group, verify=True)
            control, _ = series.measure(tokens, 0.0, args.layers, verify=False, cached=True)
            rows.append(
                {
                    "transport": transport,
                    "prefill": f"TP{pair[0]}",
                    "decode": f"TP{pair[1]}",
                    "tokens": tokens,
                    "layer_s": layer_s,
                    "whole_s": whole,
                    "layers_s": by_layers,
                    "control_s": control,
                    "writes": series.num_writes,
                    "verified": right and right_too,
                }
            )
    one = shape._replace(layers=args.group)
    with Fleet(*one.sides(), transport=transport, device=args.device) as fleet:
        series = RoomSeries(fleet, args.repeat)
        for row in rows:
            series.measure(row["tokens"], 0.0, args.group, verify=False)
            group, _ = series.measure(row["tokens"], 0.0, args.group, verify=False)
            transfer = max(0.0, group - row["control_s"])
            row["group_s"] = transfer
            row["bound_s"] = 1.3 * transfer + row["control_s"]
            print_row(row)
    return rows


class RoomSeries:
    """Rooms of the same kind, one after another."""

    def __init__(self, fleet: Fleet, repeat: int) -> None:
        self._fleet = fleet
        self._repeat = repeat
        self._rooms = 0
        self.num_writes = 0

    def measure(
        self, tokens: int, layer_s: float, layers: int, *, verify: bool, cached: bool = False
    ) -> tuple[float, bool]:
        """Return the median seconds from the last layer to Done, and whether all was right."""
        found, right = [], True
        for number in range(self._repeat):
            last = verify and number == self._repeat - 1
            seconds, good = self._carry(tokens, layer_s, layers, last, cached)
            found.append(seconds)
            right = right and good
        return statistics.median(found), right

    def _carry(
        self, tokens: int, layer_s: float, layers: int, verify: bool, cached: bool
    ) -> tuple[float, bool]:
        fleet, targets = self._fleet, self._fleet.targets["decode"]
        self._rooms += 1
        room, request = f"room-{self._rooms}", Request(tokens, tokens if cached else 0)
        if verify:
            fleet.all(targets, "clear")
            fleet.fill(room, self._rooms, tokens)
        else:
            fleet.place(room, tokens)
        fleet.receive(room, "decode", request, WAIT_S)
        fleet.all(fleet.sources, "open", room, WAIT_S)
        give_up = time.monotonic() + WAIT_S
        while any(rank.ask("status", room) == Status.CONNECTING for rank in fleet.sources):
            if time.monotonic() > give_up:
                raise TimeoutError("no offer came")
            time.sleep(0.002)
        before = self._writes()
        paced = tokens, layer_s, layers, b"first token"
        computed = max(fleet.all(fleet.sources, "push_paced", room, *paced))
        fleet.demand_done(room, [*targets, *fleet.sources], WAIT_S)
        ended = max(fleet.all(targets, "ended", room))
        problems = fleet.all(targets, "problem", room, self._rooms, request) if verify else []
        fleet.all([*targets, *fleet.sources], "wait_released", room, WAIT_S)
        if not cached:
            self.num_writes = self._writes() - before
        fleet.forget(room, "decode")
        return ended - computed, not any(problems)

    def _writes(self) -> int:
        stats = self._fleet.all(self._fleet.sources, "stats")
        return sum(mode.writes for one in stats for mode in one.modes.values())


def print_row(row: dict[str, Any]) -> None:
    """Print one readable line."""
    ms = {name: row[f"{name}_s"] * 1e3 for name in ("whole", "layers", "group", "control", "bound")}
    within = "within" if ms["layers"] <= ms["bound"] else "above"
    print(
        f"{row['transport']} {row['prefill']} → {row['decode']} {row['tokens']:>6} tokens: whole "
        f"{ms['whole']:.1f} ms, layers {ms['layers']:.1f} ms, {within} the bound of "
        f"{ms['bound']:.1f} (group {ms['group']:.1f}, control {ms['control']:.1f}), "
        f"{row['writes']} writes, {'every byte right' if row['verified'] else 'WRONG BYTES'}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
