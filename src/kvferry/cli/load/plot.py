"""A figure of sweeps: latency and throughput by concurrency. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.cli.load.stats import Level, Spread
from kvferry.errors import InputError, KvferryError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
# Distinguishable with colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
SIZE_INCHES = (12.0, 3.8)


class Series(NamedTuple):
    """One line of the figure."""

    name: str
    levels: Sequence[Level]


# The lower and the upper line of a panel at one level; None is left out.
Points = tuple[float | None, float | None]


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

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    figure.suptitle(f"{title}  (solid p50, dashed p99)")
    panels: list[tuple[str, str, Callable[[Level], Points]]] = [
        ("Time to first token", "s", lambda level: _points(level.ttft_s, 1.0)),
        ("Time per output token", "ms", lambda level: _points(level.tpot_s, 1e3)),
        ("Throughput", "output tokens/s", lambda level: (level.output_tokens_per_s, None)),
    ]
    for axes, (heading, unit, points) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.set_title(heading, fontsize="medium")
        axes.set_ylabel(unit)
        _fill(axes, series, points)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise KvferryError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _points(spread: Spread | None, scale: float) -> Points:
    return (spread.p50 * scale, spread.p99 * scale) if spread else (None, None)


def _fill(axes: Axes, series: Sequence[Series], points: Callable[[Level], Points]) -> None:
    for one, colour in zip(series, COLOURS, strict=False):
        label = one.name if any(level.ttft_s for level in one.levels) else f"{one.name}: no answers"
        styles: list[dict[str, Any]] = [
            {"marker": "o", "label": label},
            {"linestyle": "--", "linewidth": 1.0},
        ]
        for column, style in enumerate(styles):
            values = [(level.concurrency, points(level)[column]) for level in one.levels]
            known = [(x, y) for x, y in values if y is not None]
            # A line without points still has its name in the legend.
            axes.plot([x for x, _ in known], [y for _, y in known], color=colour, **style)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in flight")
    ticks = sorted({level.concurrency for one in series for level in one.levels})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
