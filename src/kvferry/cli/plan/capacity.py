"""``kvferry plan --load``: what a load does to a number of instances, as text and as a figure."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.table import Table

from kvferry.cli.load.plot import check_plot_path
from kvferry.cli.parsing import given, number, show, whole
from kvferry.cli.printing import console as new_console
from kvferry.errors import InputError, KvferryError
from kvferry.plan import Estimate, LinkCost
from kvferry.plan.capacity import (
    HandOffCost,
    LoadPrediction,
    Resource,
    ServingLoad,
    hand_off_cost,
    predict,
)
from kvferry.plan.units import human_bytes, human_seconds

MAX_RATE = 1e6
# Loads of the figure, as shares of the load at which the first resource is full.
PLOTTED = tuple(share / 20 for share in range(2, 20))
PLOT_REQUESTS = 5_000


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load."""
    load = parser.add_argument_group(
        "load", "predict what a load does, from measured speeds of the engine"
    )
    for flag, metavar, text in (
        ("--load", "R,IN,OUT", "requests per second, input and output tokens of each"),
        ("--instances", "PxD", "number of prefill and of decode instances (1x1)"),
        ("--prefill-speed", "T", "prompt tokens per second of a prefill instance (20000)"),
        ("--token-ms", "MS", "time per output token at decode (20)"),
        ("--cache-tokens", "N", "tokens that a decode instance has cache for (500000)"),
        ("--plot", "FILE", "draw the added time to first token by load (png, svg or pdf)"),
    ):
        load.add_argument(flag, metavar=metavar, help=text)


class CapacityFlags(NamedTuple):
    """The load of the flags, and where to draw its figure."""

    load: ServingLoad
    plot: Path | None


def read_flags(args: argparse.Namespace) -> CapacityFlags | None:
    """Return what the flags say; None without ``--load``."""
    others = ("instances", "prefill_speed", "token_ms", "cache_tokens", "plot")
    if given("--load", args.load) is None:
        stated = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]
        if stated:
            raise InputError(f"{', '.join(stated)} need a load; give --load, as in 20,4000,300")
        return None
    parts = args.load.split(",")
    if len(parts) != 3:
        raise InputError(
            f"--load must be requests per second, input and output tokens, as in 20,4000,300, "
            f"not {show(args.load)}"
        )
    counts = (args.instances or "1x1").split("x")
    if len(counts) != 2:
        raise InputError(f"--instances must be as in 4x8, not {show(args.instances)}")
    num_prefill, num_decode = (whole("--instances")(count) for count in counts)
    load = ServingLoad(
        requests_per_s=number("--load", 1e-6, MAX_RATE)(parts[0]),
        num_input=whole("--load")(parts[1]),
        num_output=whole("--load")(parts[2]),
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_tokens_per_s=number("--prefill-speed", 1, 1e9)(args.prefill_speed or "20000"),
        token_s=number("--token-ms", 1e-3, 1e6)(args.token_ms or "20") / 1e3,
        cache_tokens=whole("--cache-tokens")(args.cache_tokens or "500000"),
    )
    plot = given("--plot", args.plot)
    return CapacityFlags(load, None if plot is None else check_plot_path(plot))


class CapacityReport(NamedTuple):
    """A prediction, with what is needed to print it."""

    load: ServingLoad
    cost: HandOffCost
    prediction: LoadPrediction
    token_bytes: int

    @classmethod
    def of(cls, load: ServingLoad, costs: Estimate) -> CapacityReport:
        """Predict a load from the estimate of one request."""
        cost = hand_off_cost(costs)
        token_bytes = cost.num_bytes // max(1, load.num_input)
        return cls(load, cost, predict(load, cost), token_bytes)


def as_document(report: CapacityReport, link: LinkCost) -> dict[str, Any]:
    """Return the JSON document of a prediction."""
    load, cost, seen, token_bytes = report
    rate = load.requests_per_s
    return {
        "load": msgspec.to_builtins(load),
        "stable": seen.is_stable,
        "saturates_first": seen.first,
        "busy": seen.busy,
        "limits_per_s": seen.limits,
        "hand_offs_in_flight": {"mean": seen.in_flight, "p99": seen.in_flight_p99},
        "added_s": seen.added_s._asdict(),
        "ready_s": seen.ready_s._asdict(),
        "link_wait_s": seen.link_wait_s._asdict(),
        "staged": cost.is_staged,
        "link_bytes_per_s": {
            "available": link.bytes_per_s,
            "prefill_rank": rate / load.num_prefill * cost.sent_bytes,
            "decode_rank": rate / load.num_decode * cost.received_bytes,
        },
        "pinned_bytes": {
            "prefill": seen.prefill_tokens * token_bytes,
            "decode": seen.decode_tokens * token_bytes,
        },
    }


def print_report(report: CapacityReport, link: LinkCost) -> None:
    """Print what the load does, and what is full first."""
    load, cost, seen, token_bytes = report
    out = new_console()
    out.print(
        f"\n[bold]{load.requests_per_s:g} requests/s[/] of {load.num_input} + {load.num_output} "
        f"tokens on {load.num_prefill} prefill and {load.num_decode} decode instances",
        soft_wrap=True,
    )
    busy = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("resource", "busy", "full at", ""):
        busy.add_column(name, justify="right" if name in ("busy", "full at") else "left")
    for one in Resource:
        limit = f"{seen.limits[one]:,.1f} requests/s"
        busy.add_row(one, f"{seen.busy[one]:.0%}", limit, "first" if one is seen.first else "")
    out.print(busy)
    if not seen.is_stable:
        out.print(f"[bold red]too much[/]: {seen.first} is full, so waits grow without bound")
        return
    rate, speed = load.requests_per_s, link.bytes_per_s
    sent = rate / load.num_prefill * cost.sent_bytes
    received = rate / load.num_decode * cost.received_bytes
    wait = "staging" if cost.is_staged else "a link"
    rows = (
        ("added to the time to first token", _times(seen.added_s)),
        (f"of it, waiting for {wait}", _times(seen.link_wait_s)),
        ("arrival to the start of decode", _times(seen.ready_s)),
        ("hand-offs in flight", f"mean {seen.in_flight:.1f}, p99 {seen.in_flight_p99}"),
        ("bytes/s of a prefill rank", f"{human_bytes(int(sent))}, {sent / speed:.0%} of its link"),
        (
            "bytes/s of a decode rank",
            f"{human_bytes(int(received))}, {received / speed:.0%} of its link",
        ),
        ("pinned at all prefill instances", human_bytes(int(seen.prefill_tokens * token_bytes))),
        ("pinned at all decode instances", human_bytes(int(seen.decode_tokens * token_bytes))),
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _times(seconds: tuple[float, float]) -> str:
    return "p50 {}, p99 {}".format(*map(human_seconds, seconds))


def draw(path: Path, report: CapacityReport) -> None:
    """Write a figure: the added time to first token, and what is busy, by load."""
    # pyplot needs a display and keeps every figure.
    from matplotlib.figure import Figure  # noqa: PLC0415

    first = min(report.prediction.limits.values())
    rates = [share * first for share in PLOTTED]
    seen = [
        predict(replace(report.load, requests_per_s=rate), report.cost, num_requests=PLOT_REQUESTS)
        for rate in rates
    ]
    figure = Figure(figsize=(10.0, 3.8), layout="constrained")
    times, busy = figure.subplots(1, 2)
    times.plot(rates, [1e3 * one.added_s.p50 for one in seen], label="p50")
    times.plot(rates, [1e3 * one.added_s.p99 for one in seen], "--", label="p99")
    times.set(title="Added to the time to first token", xlabel="requests/s", ylabel="ms")
    for resource in Resource:
        busy.plot(rates, [100 * one.busy[resource] for one in seen], label=str(resource))
    busy.set(title="Busy", xlabel="requests/s", ylabel="%")
    for axes in (times, busy):
        axes.set_ylim(bottom=0)
        axes.axvline(report.load.requests_per_s, color="grey", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise KvferryError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None
