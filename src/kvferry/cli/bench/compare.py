"""``kvferry bench compare``: the same load on clusters with different layouts and modes."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.markup import escape

from kvferry.cli.bench.load import (
    COLUMNS,
    LoadProgress,
    finish,
    level_cells,
    level_table,
    load_of,
    plot_path,
    token_counts,
)
from kvferry.cli.carried import carried_by_mode
from kvferry.cli.files import last_log_line
from kvferry.cli.load.plot import Series
from kvferry.cli.load.stats import Level
from kvferry.cli.load.sweep import Load, Sweep, run_sweep
from kvferry.cli.needs import demand_transport
from kvferry.cli.parsing import given
from kvferry.cli.printing import console, print_document
from kvferry.cli.serve.flags import cluster_of
from kvferry.errors import InputError, KvferryError
from kvferry.plan import TransferMode
from kvferry.plan.units import human_bytes
from kvferry.reference.cluster.description import ClusterDescription, check
from kvferry.reference.cluster.launch import ClusterLaunch
from kvferry.reference.models.find import ModelFolder, find_model
from kvferry.transports.registry import available, ready_transports

# Those that can stage first; shm is always available.
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
        """The transfer mode that is forced."""
        return self.cluster.prefill[0].mode

    @property
    def sides(self) -> str:
        """Both layouts, as in ``TP4 → TP1``."""
        return f"{self.cluster.prefill[0]} → {self.cluster.decode[0]}"


class VariantResult(NamedTuple):
    """A variant's sweep, or the error that prevented it; ``modes`` has the bytes by mode."""

    variant: Variant
    sweep: Sweep | None
    error: str | None
    seconds: float
    modes: dict[str, int]

    @property
    def levels(self) -> list[Level]:
        """The measured levels."""
        return self.sweep.levels if self.sweep else []

    @property
    def num_bytes(self) -> int:
        """Bytes carried for all measured requests."""
        return sum(level.carried_bytes or 0 for level in self.levels)

    def document(self) -> dict[str, Any]:
        """Return the variant's part of the JSON document."""
        cluster = self.variant.cluster
        return {
            "name": self.variant.name,
            "prefill": str(cluster.prefill[0]),
            "decode": str(cluster.decode[0]),
            "mode": str(self.variant.mode),
            "modes": self.modes,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "error": self.error,
            "levels": msgspec.to_builtins(self.levels),
        }


def run(args: argparse.Namespace) -> int:
    """Start and measure every variant, print the levels, and draw them."""
    # Without this, decode would compute the prompt itself after a failed transfer.
    load = load_of(args, extra={"kvferry": {"on_failure": "fail"}})
    plot = plot_path(args)
    args.transport = given("--transport", args.transport) or _default_transport()
    demand_transport(args.transport)
    can_stage = any(not one.maps_peer for one in ready_transports(args.transport))
    variants = variants_of(cluster_of(args), load, can_stage=can_stage)
    model = find_model(variants[0].cluster.model)
    for variant in variants:
        check(variant.cluster, model)
    results = []
    for i, variant in enumerate(variants, 1):
        progress = LoadProgress(f"{i} of {len(variants)}, {variant.name}: ")
        results.append(measure(variant, model, load, progress))
    failure = failure_of(results)
    note = None if can_stage else NO_STAGING.format(args.transport)
    if args.json:
        print_document(as_document(results, model, load, note) | {"error": failure})
    else:
        show(results, load, note)
    series = [Series(one.variant.name, one.levels) for one in results]
    return finish(failure, plot, f"{model.name} over {args.transport}: {load.lengths}", series)


def _default_transport() -> str:
    problems = available()
    return next(name for name in TRANSPORTS if problems[name] is None)


def variants_of(cluster: ClusterDescription, load: Load, *, can_stage: bool) -> list[Variant]:
    """Return equal layouts first, then the given prefill with each transfer mode."""
    (prefill,), (decode,) = cluster.prefill, cluster.decode
    if prefill.tp == decode.tp:
        raise InputError("both sides shard alike, so there is nothing to compare; change --prefill")
    at_once = max(load.concurrency)
    cache_tokens = 2 * at_once * (load.input_tokens + load.output_tokens)
    room = {"cache_tokens": max(cache_tokens, LEAST_CACHE_TOKENS), "max_requests": at_once}
    sides = {
        # Whole pages fit: the baseline of the others.
        "equal TP": replace(decode, mode=TransferMode.RUNS),
        "different TP, slices": replace(prefill, mode=TransferMode.SLICES),
    }
    if can_stage:
        sides["different TP, staged"] = replace(prefill, mode=TransferMode.STAGED)
    decodes = (replace(decode, **room),)
    return [
        Variant(name, replace(cluster, prefill=(replace(side, **room),), decode=decodes))
        for name, side in sides.items()
    ]


def measure(
    variant: Variant, model: ModelFolder, load: Load, progress: LoadProgress
) -> VariantResult:
    """Start a cluster, sweep it, and stop it; an error ends only this variant."""
    began = time.monotonic()
    sweep, error = None, None
    modes: dict[str, int] = {}
    with tempfile.TemporaryFile() as log, progress:
        try:
            with ClusterLaunch(output=log) as launch:
                progress.show("starting")
                url = launch.start_all(variant.cluster, model, lambda *_: None)
                sweep = run_sweep(url, load, progress)
                modes = carried_by_mode(launch)
                progress.show("stopping")
            error = sweep.failure
        except KvferryError as problem:
            error = f"{problem}{last_log_line(log)}"
    return VariantResult(variant, sweep, error, time.monotonic() - began, modes)


# ---------------------------------------------------------------- output


def failure_of(results: Sequence[VariantResult]) -> str | None:
    """Return all errors as one sentence; None if every request was answered."""
    failed = [f"{one.variant.name}: {one.error}" for one in results if one.error]
    return "; ".join(failed) or None


def as_document(
    results: Sequence[VariantResult], model: ModelFolder, load: Load, note: str | None
) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "model": model.name,
        "transport": results[0].variant.cluster.transport,
        **load.settings,
        "note": note,
        "variants": [one.document() for one in results],
    }


def show(results: Sequence[VariantResult], load: Load, note: str | None) -> None:
    """Print the table of levels and a line about each variant."""
    out, table = console(), level_table("variant")
    for one in results:
        for i, level in enumerate(one.levels):
            name = "" if i else f"[bold]{one.variant.name}[/]"
            table.add_row(name, *level_cells(level))
        if one.sweep is None:
            table.add_row(f"[bold red]{one.variant.name}[/]", *"-" * len(COLUMNS))
    out.print(table)
    out.print()
    for one in results:
        out.print(escape(_summary(one)), soft_wrap=True)
    levels = [level for one in results for level in one.levels]
    if levels:
        out.print(f"{token_counts(levels)}; no two prompts begin alike (seed {load.seed})")
    if note:
        out.print(note, soft_wrap=True)


def _summary(result: VariantResult) -> str:
    heading = f"{result.variant.name}: {result.variant.sides}"
    if result.sweep is None:
        return f"{heading}: failed"
    modes = [f"{human_bytes(size)} as {mode}" for mode, size in result.modes.items()]
    return f"{heading}; carried: {', '.join(modes) or 'nothing'}"
