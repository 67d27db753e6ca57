"""Drawing of a room's waterfall as HTML: facts, and a row with a bar per step. Pure.

The fragment is part of the dashboard's page, whose style sheet it uses. It is well-formed XML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from msgspec.structs import replace

from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

STAGE_NAMES = {stage: str(stage) for stage in RoomStage} | {RoomStage.PAGES: "wait for pages"}


def waterfall_html(waterfall: Waterfall) -> str:
    """Return the drawing as a fragment."""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts_of(waterfall)
    )
    rows = "".join(_row(bar, times, waterfall.span_s) for bar, times in merged(waterfall.bars))
    return f'<div class="wf"><dl>{facts}</dl><table><tbody>{rows}</tbody></table></div>'


def _row(bar: WaterfallBar, times: int, span_s: float) -> str:
    # A room with a single step has no extent.
    percent = 100 / (span_s or 1e-9)
    width = percent * (bar.ended_s - bar.begun_s) if bar.step in SPANS else 0.0
    style = f"margin-left:min({percent * bar.begun_s:.3f}%,100% - 3px);width:{width:.3f}%"
    names = (human_seconds(bar.begun_s), bar.endpoint, bar.step, bar.peer)
    return (
        f"<tr>{''.join(f'<td>{escape(name)}</td>' for name in names)}"
        f'<td class="time"><i class="{SPANS.get(bar.step, bar.step)}" style="{style}"></i></td>'
        f"<td>{escape(details(bar, times))}</td></tr>"
    )


def facts_of(waterfall: Waterfall) -> list[tuple[str, str]]:
    """Return the facts that a reader needs first, as pairs of a name and a value."""
    total = waterfall.seconds
    stages = [
        f"{STAGE_NAMES[stage]} {human_seconds(seconds)} ({seconds / total:.0%})"
        for stage, seconds in sorted(waterfall.stages.items(), key=lambda one: -one[1])
        if seconds > 0
    ]
    facts = [
        ("outcome", f"{waterfall.outcome} after {human_seconds(total)}"),
        ("stages", ", ".join(stages)),
        ("reason", waterfall.failure),
        ("request", waterfall.request),
        ("traceparent", waterfall.traceparent),
        ("clocks", _clocks(waterfall)),
        ("left out", f"{waterfall.left_out} steps" if waterfall.left_out else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _clocks(waterfall: Waterfall) -> str:
    """Name the clock in use, and how far the others may be off."""
    errors = [error_s for error_s in waterfall.clock_errors_s.values() if error_s]
    unknown = [name for name, error_s in waterfall.clock_errors_s.items() if error_s is None]
    text = f"times are {waterfall.clock}'s"
    if errors:
        text += f"; others within {human_seconds(max(errors))}"
    return text + (f"; not measured: {', '.join(unknown)}" if unknown else "")


def details(bar: WaterfallBar, times: int) -> str:
    """Return a bar's count, duration, size, transfer mode and detail, as far as it has them."""
    count = f"×{times}" if times > 1 else ""
    took = human_seconds(bar.ended_s - bar.begun_s) if bar.step in SPANS else ""
    size = human_bytes(bar.num_bytes) if bar.num_bytes else ""
    return " ".join(filter(None, (count, took, size, bar.mode, bar.detail)))


def merged(bars: Sequence[WaterfallBar]) -> list[tuple[WaterfallBar, int]]:
    """Merge neighbouring bars of one kind; return each with the number of bars in it."""
    lines = []
    for _, group in groupby(bars, key=lambda bar: (bar.endpoint, bar.step, bar.peer, bar.mode)):
        alike = list(group)
        whole = replace(
            alike[0],
            ended_s=max(bar.ended_s for bar in alike),
            num_bytes=sum(bar.num_bytes for bar in alike),
            detail=alike[0].detail if len(alike) == 1 else "",
        )
        lines.append((whole, len(alike)))
    return lines
