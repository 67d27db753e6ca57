"""A figure of sweeps: latency and throughput by concurrency. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvferry.cli.load.stats import Level
from kvferry.errors import InputError, KvferryError

FORMATS = ("png", "svg", "pdf")
# Distinguishable with colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
NAN = float("nan")


class Series(NamedTuple):
    """One line of the figure."""

    name: str
    levels: Sequence[Level]


# Title, unit, and the solid and the dashed value of a level; a line has a gap at nan.
PANELS: tuple[tuple[str, str, Callable[[Level], tuple[float, float]]], ...] = (
    (
        "Time to first token",
        "s",
        lambda one: (one.ttft_s.p50, one.ttft_s.p99) if one.ttft_s else (NAN, NAN),
    ),
    (
        "Time per output token",
        "ms",
        lambda one: (1e3 * one.tpot_s.p50, 1e3 * one.tpot_s.p99) if one.tpot_s else (NAN, NAN),
    ),
    ("Throughput", "output tokens/s", lambda one: (one.output_tokens_per_s, NAN)),
)


def check_plot_path(name: str) -> Path:
    """Return the figure's path. Raises ``InputError`` if no figure can be written there."""
    path = Path(name)
    if path.suffix[1:].lower() not in FORMATS:
        raise InputError(f"cannot draw {name!r}; end its name in {', '.join(FORMATS)}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"cannot write {name!r}; choose a folder that exists and can be written")
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - is it installed?
    except ImportError:
        raise InputError(
            'a figure needs matplotlib; install it with pip install "kvferry[plot]"'
        ) from None
    return path


def draw(path: Path, title: str, series: Sequence[Series]) -> None:
    """Write the figure: solid lines are medians, dashed ones the 99th percentile."""
    # pyplot needs a display and keeps every figure.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12.0, 3.8), layout="constrained")
    figure.suptitle(f"{title}  (solid p50, dashed p99)")
    for axes, (heading, unit, values) in zip(figure.subplots(1, 3), PANELS, strict=True):
        axes.set_title(heading, fontsize="medium")
        axes.set(xlabel="requests in flight", ylabel=unit)
        for one, colour in zip(series, COLOURS, strict=False):
            answered = any(level.ttft_s for level in one.levels)
            label = one.name if answered else f"{one.name}: no answers"
            counts = [level.concurrency for level in one.levels]
            solid, dashed = zip(*map(values, one.levels), strict=True) if counts else ((), ())
            axes.plot(counts, solid, color=colour, marker="o", label=label)
            axes.plot(counts, dashed, color=colour, linestyle="--", linewidth=1.0)
        ticks = sorted({level.concurrency for one in series for level in one.levels})
        axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise KvferryError(f"cannot write {str(path)!r}: {error.strerror}") from None
