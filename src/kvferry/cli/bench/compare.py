"""``kvferry bench compare``: the same load on clusters that shard and send differently."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from rich.markup import escape

from kvferry.cli.bench.load import (
    COLUMNS,
    Bar,
    cells,
    counted,
    finish,
    lengths,
    level_table,
    load_fields,
    load_of,
    plot_of,
    wide_console,
)
from kvferry.cli.files import last_log_line
from kvferry.cli.load.plot import Series
from kvferry.cli.load.stats import Level
from kvferry.cli.load.sweep import Load, Sweep, run_sweep
from kvferry.cli.parsing import given
from kvferry.cli.printing import print_document
from kvferry.cli.serve.flags import cluster_of
from kvferry.errors import InputError, KvferryError
from kvferry.plan import TransferMode
from kvferry.plan.units import human_bytes
from kvferry.reference.cluster.description import ClusterDescription, ModelFolder, check
from kvferry.reference.cluster.launch import ClusterLaunch
from kvferry.reference.cluster.needs import demand_transport
from kvferry.reference.models.find import find_model
from kvferry.transports.registry import available, ready_transports

# Those that can stage, the better known one first; then the one that is always there.
TRANSPORTS = ("nixl", "mooncake", "shm")
NO_STAGING = (
    "over {} prefill writes into decode's mapped memory, so there is nothing to stage; "
    "compare staging with --transport nixl or mooncake"
)
LEAST_CACHE_TOKENS = 2048


class Variant(NamedTuple):
    """One of the clusters that are compared."""

    name: str
    cluster: ClusterDescription

    @property
    def mode(self) -> TransferMode | None:
        """The mode that is forced."""
        return self.cluster.prefill[0].mode


class VariantOutcome(NamedTuple):
    """What came of a variant: a sweep, or why there is none."""

    variant: Variant
    sweep: Sweep | None
    error: str | None
    seconds: float

    @property
    def levels(self) -> list[Level]:
        """What was measured."""
        return self.sweep.levels if self.sweep else []

    @property
    def modes(self) -> dict[str, int]:
        """Requests by the mode that they took."""
        modes = Counter[str]()
        for level in self.levels:
            modes.update(level.modes)
        return dict(modes)

    @property
    def num_bytes(self) -> int:
        """What travelled for all measured requests."""
        return sum(level.carried_bytes or 0 for level in self.levels)


def run(args: argparse.Namespace) -> int:
    """Read, start and measure one after the other, print, draw."""
    # A transfer that fails must count as one: decode would compute the prompt itself.
    load = load_of(args, extra={"kvferry": {"on_failure": "fail"}})
    figure = plot_of(args)
    args.transport = given("--transport", args.transport) or _best_transport()
    demand_transport(args.transport)
    can_stage = any(not one.maps_peer for one in ready_transports(args.transport))
    variants = variants_of(cluster_of(args), load, can_stage=can_stage)
    model = find_model(variants[0].cluster.model)
    for variant in variants:
        check(variant.cluster, model)
    outcomes = []
    for i, variant in enumerate(variants, 1):
        bar = Bar(f"{i} of {len(variants)}, {variant.name}: ")
        outcomes.append(measure(variant, model, load, bar))
    failure = failure_of(outcomes)
    note = None if can_stage else NO_STAGING.format(args.transport)
    if args.json:
        print_document(as_document(outcomes, model, load, note) | {"error": failure})
    else:
        show(outcomes, load, note)
    series = [Series(one.variant.name, one.levels) for one in outcomes]
    title = f"{model.name} over {args.transport}: {lengths(load)}"
    return finish(failure, figure, title, series)


def _best_transport() -> str:
    problems = available()
    return next(name for name in TRANSPORTS if problems[name] is None)


def variants_of(cluster: ClusterDescription, load: Load, *, can_stage: bool) -> list[Variant]:
    """Decode as it is; before it the same, then the other prefill by each mode."""
    replace = msgspec.structs.replace
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    if prefill.parallel == decode.parallel:
        raise InputError("both sides shard alike, so nothing differs; change --prefill")
    at_once = max(load.concurrency)
    cache_tokens = 2 * at_once * (load.input_tokens + load.output_tokens)
    room = {"cache_tokens": max(cache_tokens, LEAST_CACHE_TOKENS), "max_requests": at_once}
    sides = {
        # Whole pages fit, so this is what the others are to be measured by.
        "equal TP": replace(decode, mode=TransferMode.RUNS),
        "different TP, slices": replace(prefill, mode=TransferMode.SLICES),
    }
    if can_stage:
        sides["different TP, staged"] = replace(prefill, mode=TransferMode.STAGED)
    return [
        Variant(
            name,
            replace(
                cluster,
                prefill=(replace(side, **room),),
                decode=(replace(decode, **room),),
            ),
        )
        for name, side in sides.items()
    ]


def measure(variant: Variant, model: ModelFolder, load: Load, bar: Bar) -> VariantOutcome:
    """Start a cluster, sweep it, stop it. A failure is this variant's own."""
    began = time.monotonic()
    sweep, error = None, None
    with tempfile.TemporaryFile() as log, bar:
        try:
            with ClusterLaunch(stderr=log) as launch:
                bar.says("starting")
                url = launch.start_all(variant.cluster, model, lambda *_: None)
                sweep = run_sweep(url, load, bar)
                bar.says("stopping")
            error = sweep.failure
        except KvferryError as problem:
            error = f"{problem}{last_log_line(log)}"
    return VariantOutcome(variant, sweep, error, time.monotonic() - began)


# ---------------------------------------------------------------- the end


def failure_of(outcomes: Sequence[VariantOutcome]) -> str | None:
    """What went wrong, as a sentence; None if all was answered."""
    failed = [f"{one.variant.name}: {one.error}" for one in outcomes if one.error]
    return "; ".join(failed) or None


def as_document(
    outcomes: Sequence[VariantOutcome], model: ModelFolder, load: Load, note: str | None
) -> dict[str, Any]:
    """All of it for programs."""
    return {
        "model": model.name,
        "transport": outcomes[0].variant.cluster.transport,
        **load_fields(load),
        "note": note,
        "variants": [_variant(one) for one in outcomes],
    }


def _variant(one: VariantOutcome) -> dict[str, Any]:
    cluster = one.variant.cluster
    return {
        "name": one.variant.name,
        "prefill": str(cluster.prefill[0]),
        "decode": str(cluster.decode[0]),
        "mode": str(one.variant.mode),
        "modes": one.modes,
        "bytes": one.num_bytes,
        "seconds": one.seconds,
        "error": one.error,
        "levels": msgspec.to_builtins(one.levels),
    }


def show(outcomes: Sequence[VariantOutcome], load: Load, note: str | None) -> None:
    """And for people."""
    console = wide_console()
    table = level_table("variant")
    for one in outcomes:
        for i, level in enumerate(one.levels):
            table.add_row("" if i else f"[bold]{one.variant.name}[/]", *cells(level))
        if one.sweep is None:
            table.add_row(f"[bold red]{one.variant.name}[/]", *"-" * len(COLUMNS))
    console.print(table)
    console.print()
    for one in outcomes:
        console.print(escape(_about(one)), soft_wrap=True)
    levels = [level for one in outcomes for level in one.levels]
    if levels:
        console.print(f"{counted(levels)}; no two prompts begin alike (seed {load.seed})")
    if note:
        console.print(note, soft_wrap=True)


def _about(one: VariantOutcome) -> str:
    cluster = one.variant.cluster
    sides = f"{one.variant.name}: {cluster.prefill[0]} → {cluster.decode[0]}"
    if one.sweep is None:
        return f"{sides}: failed"
    modes = [f"{count} by {mode}" for mode, count in one.modes.items()]
    answered = sum(level.requests - level.failed for level in one.levels)
    untold = answered - sum(one.modes.values())
    if untold:
        # Decode asks prefill which it was, and does not wait long for the answer.
        modes.append(f"{untold} by a mode that was not told")
    return f"{sides}; {human_bytes(one.num_bytes)} in all; requests: {', '.join(modes) or 'none'}"
