"""Drawing of a room's waterfall as SVG: stages on top, below them a lane per endpoint. Pure.

The SVG works alone or inside a page, in light and dark mode. Instants are marks at the upper
edge of a lane; gathers, writes and scatters are bars below, in one row each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.steps import StepKind
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

WIDTH, LEFT, RIGHT = 1000.0, 150.0, 24.0
PLOT_WIDTH = WIDTH - LEFT - RIGHT
TOP, STAGE_HEIGHT, LANE_HEAD, BAR_HEIGHT, ROW_HEIGHT, LANE_GAP = 16.0, 26.0, 26.0, 9.0, 11.0, 14.0
LANE_HEIGHT = LANE_HEAD + len(SPANS) * ROW_HEIGHT + 6
CHAR_WIDTH = 5.9
# Steps that get a label beside their mark, if there is room.
LABELLED = (
    *(StepKind.ASKED, StepKind.OPENED, StepKind.OFFERED, StepKind.ACCEPTED, StepKind.FINISHED),
    *(StepKind.CLOSED, StepKind.COMPLETED, StepKind.DONE, StepKind.FAILED, StepKind.RELEASED),
)
STAGE_NAMES = {stage: str(stage) for stage in RoomStage} | {RoomStage.PAGES: "wait for pages"}

STYLE = """
.wf{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;--ink:#16202c;--soft:#5b6878;
--rule:#dfe5ec;--lane:#f4f6f9;--prefill:#8b95a5;--pages:#d9822b;--wire:#1476d4;--gather:#7a5bd6;
--scatter:#0f9d7a;--control:#c9d1db;--bad:#cf2f3d}
.wf text{fill:var(--ink)}.wf .soft{fill:var(--soft)}.wf .rule{stroke:var(--rule)}
.wf .lane{fill:var(--lane)}.wf .mark{fill:var(--soft)}.wf .mark.failed{fill:var(--bad)}
.wf .mark.done{fill:var(--scatter)}.wf .num{font-variant-numeric:tabular-nums}
.wf .prefill{fill:var(--prefill)}.wf .pages{fill:var(--pages)}.wf .wire{fill:var(--wire)}
.wf .gather{fill:var(--gather)}.wf .scatter{fill:var(--scatter)}.wf .control{fill:var(--control)}
.wf .bar{fill-opacity:.7}
@media (prefers-color-scheme:dark){.wf{--ink:#e8edf4;--soft:#9aa7b8;--rule:#2b3543;--lane:#1a212b;
--prefill:#7c889a;--pages:#e9973f;--wire:#4ba3f5;--gather:#a48bf0;--scatter:#2fc49c;
--control:#3b4757;--bad:#ff6470}}
"""


def waterfall_svg(waterfall: Waterfall) -> str:
    """Return the drawing."""
    # A room with a single step has no extent.
    span_s = waterfall.span_s or 1e-9
    top = bottom = TOP + STAGE_HEIGHT + 44
    lanes: list[str] = []
    for role, endpoint in sorted({(bar.role, bar.endpoint) for bar in waterfall.bars}):
        bars = [bar for bar in waterfall.bars if bar.endpoint == endpoint]
        lanes.append(_lane(bars, endpoint, role, span_s, bottom))
        bottom += LANE_HEIGHT + LANE_GAP
    body = "".join([_stages(waterfall), _axis(span_s, top - 6, bottom + 4), *lanes])
    outcome = f"{waterfall.outcome} after {human_seconds(waterfall.seconds)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wf" '
        f'viewBox="0 0 {WIDTH:g} {bottom + 20:g}" role="img" '
        f'aria-label="{escape(f"the room {waterfall.room}: {outcome}")}">'
        f"<style>{STYLE}</style>{body}</svg>"
    )


def waterfall_page(waterfall: Waterfall) -> str:
    """Return a self-contained HTML page with the drawing and its facts."""
    title = escape(f"Room {waterfall.room}")
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts_of(waterfall)
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>
<style>:root{{color-scheme:light dark}}body{{font:14px/1.5 system-ui,sans-serif;margin:24px auto;
max-width:1100px;padding:0 16px}}svg{{width:100%;height:auto}}dl{{display:grid;
grid-template-columns:max-content 1fr;gap:2px 16px}}dt{{opacity:.65}}dd{{margin:0}}</style>
<h1>{title}</h1><dl>{facts}</dl>{waterfall_svg(waterfall)}</html>
"""


def facts_of(waterfall: Waterfall) -> list[tuple[str, str]]:
    """Return the facts that a reader needs first, as pairs of a name and a value."""
    total, longest = waterfall.seconds, waterfall.longest_stage
    took = waterfall.stages[longest]
    share = took / total if total > 0 else 0.0
    stages = [
        f"{STAGE_NAMES[stage]} {human_seconds(took)}"
        for stage, took in waterfall.stages.items()
        if took > 0
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


def details(bar: WaterfallBar) -> str:
    """Return a bar's duration, size, transfer mode and detail, as far as it has them."""
    took = human_seconds(bar.ended_s - bar.begun_s) if bar.step in SPANS else ""
    size = human_bytes(bar.num_bytes) if bar.num_bytes else ""
    return " ".join(filter(None, (took, size, bar.mode, bar.detail)))


def _clocks(waterfall: Waterfall) -> str:
    """Say whose clock is used, and how far the others may be off."""
    others = [one for one in waterfall.clocks if one.endpoint != waterfall.clock]
    errors = [one.error_s for one in others if one.error_s is not None]
    unknown = [one.endpoint for one in others if one.error_s is None]
    text = f"times are {waterfall.clock}'s"
    if errors:
        text += f"; others within {human_seconds(max(errors))}"
    return text + (f"; not measured: {', '.join(unknown)}" if unknown else "")


def _stages(waterfall: Waterfall) -> str:
    """Draw the strip of stages, and its legend below."""
    total = waterfall.seconds or 1e-9
    parts = [f'<text x="0" y="{TOP + 17}" font-weight="600">where it went</text>']
    strip_x = legend_x = LEFT
    legend_y = TOP + STAGE_HEIGHT + 18
    for stage, seconds in waterfall.stages.items():
        if seconds <= 0:
            continue
        width = PLOT_WIDTH * seconds / total
        label = f"{STAGE_NAMES[stage]} {human_seconds(seconds)}"
        parts.append(
            f'<rect class="{stage}" x="{strip_x:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{STAGE_HEIGHT}"><title>{escape(label)}, {seconds / total:.0%}</title></rect>'
            f'<rect class="{stage}" x="{legend_x:.1f}" y="{legend_y - 9}" width="10" height="10" '
            f'rx="2"/><text class="num" x="{legend_x + 15:.1f}" y="{legend_y}">'
            f"{escape(label)}</text>"
        )
        strip_x += width
        legend_x += 37 + CHAR_WIDTH * len(label)
    return "".join(parts)


def _axis(span_s: float, top: float, bottom: float) -> str:
    parts = []
    for i in range(6):
        x, anchor = LEFT + PLOT_WIDTH * i / 5, "end" if i == 5 else "middle"
        parts.append(
            f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}"/>'
            f'<text class="soft num" x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="{anchor}">'
            f"{escape(human_seconds(span_s * i / 5))}</text>"
        )
    return "".join(parts)


def _lane(bars: Sequence[WaterfallBar], endpoint: str, role: str, span_s: float, top: float) -> str:
    parts = [
        f'<rect class="lane" x="{LEFT}" y="{top:.1f}" width="{PLOT_WIDTH:.1f}" '
        f'height="{LANE_HEIGHT:.1f}" rx="4"/>'
        f'<text x="0" y="{top + 15:.1f}" font-weight="600">{escape(endpoint[:22])}</text>'
        f'<text class="soft" x="0" y="{top + 30:.1f}">'
        f"{'prefill' if role == 'source' else 'decode'}</text>",
        *_marks((bar for bar in bars if bar.step not in SPANS), span_s, top),
    ]
    for row, (step, stage) in enumerate(SPANS.items()):
        y = top + LANE_HEAD + row * ROW_HEIGHT
        parts += [
            f'<rect class="bar {stage}" x="{_x(bar.begun_s, span_s):.1f}" y="{y:.1f}" '
            f'width="{max(1.5, PLOT_WIDTH * (bar.ended_s - bar.begun_s) / span_s):.1f}" '
            f'height="{BAR_HEIGHT}" rx="2">{_tooltip(bar)}</rect>'
            for bar in bars
            if bar.step is step
        ]
    return f"<g>{''.join(parts)}</g>"


def _marks(bars: Iterable[WaterfallBar], span_s: float, top: float) -> list[str]:
    parts, free_from = [], 0.0
    for bar in bars:
        x = _x(bar.ended_s, span_s)
        parts.append(
            f'<circle class="mark {bar.step}" cx="{x:.1f}" cy="{top + 7:.1f}" r="3">'
            f"{_tooltip(bar)}</circle>"
        )
        width = CHAR_WIDTH * len(bar.step)
        left = min(x - 2, WIDTH - RIGHT - width)
        if bar.step in LABELLED and left >= free_from:
            parts.append(
                f'<text class="soft" font-size="10" x="{left:.1f}" y="{top + 21:.1f}">'
                f"{bar.step}</text>"
            )
            free_from = left + width + 4
    return parts


def _x(at_s: float, span_s: float) -> float:
    return LEFT + PLOT_WIDTH * at_s / span_s


def _tooltip(bar: WaterfallBar) -> str:
    peer = f" {'from' if bar.heard else 'to'} {bar.peer}" if bar.peer else ""
    text = f"{human_seconds(bar.ended_s)}: {bar.step}{peer} {details(bar)}"
    return f"<title>{escape(text.rstrip())}</title>"
