"""Drawing of a room's waterfall as HTML: facts, stages, and a row with a bar per step. Pure.

The fragment works inside the dashboard's page and alone, in light and dark mode. It is
well-formed XML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from msgspec.structs import replace

from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

STAGE_NAMES = {stage: str(stage) for stage in RoomStage} | {RoomStage.PAGES: "wait for pages"}

STYLE = """
.wf{font:13px/1.5 system-ui,sans-serif}.wf i{display:block;min-width:3px;font-style:normal}
.wf dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px}.wf dt{opacity:.65}
.wf dd{margin:0;overflow-wrap:anywhere}.wf .stages{display:flex;margin:12px 0}
.wf .stages i{padding:3px 0;overflow:hidden;white-space:nowrap;color:#fff}
.wf table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.wf td{padding:2px 12px 2px 0;border-bottom:1px solid #8884;white-space:nowrap}
.wf .time{width:45%;padding:0}.wf .time i{height:10px;border-radius:2px;background:#8b95a5}
.wf i.prefill{background:#7c889a}.wf i.pages{background:#c9741c}.wf i.wire{background:#1476d4}
.wf i.gather{background:#7a5bd6}.wf i.scatter,.wf i.done{background:#0f8d6e}
.wf i.control{background:#56657a}.wf i.failed{background:#cf2f3d}
"""


def waterfall_html(waterfall: Waterfall) -> str:
    """Return the drawing as a fragment."""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts_of(waterfall)
    )
    stages = "".join(
        f'<i class="{stage}" style="flex:{seconds / waterfall.seconds:.6f} 1 0" title="{label}">'
        f"{label}</i>"
        for stage, seconds in waterfall.stages.items()
        if seconds > 0 and (label := escape(f"{STAGE_NAMES[stage]} {human_seconds(seconds)}"))
    )
    rows = "".join(_row(bar, times, waterfall.span_s) for bar, times in merged(waterfall.bars))
    return (
        f'<div class="wf"><style>{STYLE}</style><dl>{facts}</dl>'
        f'<div class="stages">{stages}</div><table><tbody>{rows}</tbody></table></div>'
    )


def waterfall_page(waterfall: Waterfall) -> str:
    """Return a self-contained HTML page with the drawing."""
    title = escape(f"Room {waterfall.room}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>:root{{color-scheme:light dark}}body{{margin:24px}}</style>"
        f"<h1>{title}</h1>{waterfall_html(waterfall)}</html>\n"
    )


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
    total, longest = waterfall.seconds, waterfall.longest_stage
    took = waterfall.stages[longest]
    share = took / total if total > 0 else 0.0
    stages = [
        f"{STAGE_NAMES[stage]} {human_seconds(seconds)}"
        for stage, seconds in waterfall.stages.items()
        if seconds > 0
    ]
    facts = [
        ("outcome", f"{waterfall.outcome} after {human_seconds(total)}"),
        ("longest stage", f"{STAGE_NAMES[longest]}, {human_seconds(took)} ({share:.0%})"),
        ("stages", ", ".join(stages)),
        ("reason", waterfall.failure),
        ("request", waterfall.request),
        ("traceparent", waterfall.traceparent),
        ("clocks", _clocks(waterfall)),
        ("left out", f"{waterfall.left_out} steps" if waterfall.left_out else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _clocks(waterfall: Waterfall) -> str:
    """Say whose clock is used, and how far the others may be off."""
    others = [one for one in waterfall.clocks if one.endpoint != waterfall.clock]
    errors = [one.error_s for one in others if one.error_s is not None]
    unknown = [one.endpoint for one in others if one.error_s is None]
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
