"""A drawing of a waterfall: where the time of a room went, and every step on its lane. Pure.

An SVG that stands alone or inside a page, in light and dark; ``waterfall_page`` puts it into one.
Each endpoint has a lane: moments are marks on its upper edge, and what takes time (gathers,
writes, scatters) are bars below, side by side where they overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from kvferry.plan.units import human_bytes, human_seconds
from kvferry.telemetry.steps import Moment
from kvferry.telemetry.waterfall import SPANS, RoomStage, Waterfall, WaterfallBar

WIDTH = 1000.0
LEFT, RIGHT = 150.0, 24.0
TOP, STAGE_H, LANE_HEAD, BAR_H, BAR_GAP, LANE_GAP = 16.0, 26.0, 26.0, 9.0, 2.0, 14.0
MOST_ROWS = 8
# These are worth a word beside their mark, if there is room for it.
NAMED = (
    *(Moment.ASKED, Moment.OPENED, Moment.OFFERED, Moment.ACCEPTED, Moment.FINISHED),
    *(Moment.CLOSED, Moment.COMPLETED, Moment.DONE, Moment.FAILED, Moment.RELEASED),
)
CHAR_W = 5.9
WORDS = {
    RoomStage.PREFILL: "prefill",
    RoomStage.PAGES: "wait for pages",
    RoomStage.WIRE: "wire",
    RoomStage.GATHER: "gather",
    RoomStage.SCATTER: "scatter",
    RoomStage.CONTROL: "control",
}

STYLE = """
.wf{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;--ink:#16202c;--soft:#5b6878;
--rule:#dfe5ec;--lane:#f4f6f9;--prefill:#8b95a5;--pages:#d9822b;--wire:#1476d4;--gather:#7a5bd6;
--scatter:#0f9d7a;--control:#c9d1db;--bad:#cf2f3d}
.wf text{fill:var(--ink)}.wf .soft{fill:var(--soft)}.wf .rule{stroke:var(--rule)}
.wf .lane{fill:var(--lane)}.wf .mark{fill:var(--soft)}.wf .mark.failed{fill:var(--bad)}
.wf .mark.done{fill:var(--scatter)}.wf .num{font-variant-resolve_ip:tabular-nums}
.wf .prefill{fill:var(--prefill)}.wf .pages{fill:var(--pages)}.wf .wire{fill:var(--wire)}
.wf .gather{fill:var(--gather)}.wf .scatter{fill:var(--scatter)}.wf .control{fill:var(--control)}
@media (prefers-color-scheme:dark){.wf{--ink:#e8edf4;--soft:#9aa7b8;--rule:#2b3543;--lane:#1a212b;
--prefill:#7c889a;--pages:#e9973f;--wire:#4ba3f5;--gather:#a48bf0;--scatter:#2fc49c;
--control:#3b4757;--bad:#ff6470}}
"""


class _Lane(NamedTuple):
    endpoint: str
    role: str
    bars: list[WaterfallBar]
    rows: list[list[WaterfallBar]]

    @property
    def height(self) -> float:
        return LANE_HEAD + max(1, len(self.rows)) * (BAR_H + BAR_GAP) + 6


def waterfall_svg(trace: Waterfall) -> str:
    """The drawing."""
    span_s = max((bar.ended_s for bar in trace.bars), default=0.0) or 1e-9
    lanes = [_lane(name, trace.bars) for name in _endpoints(trace.bars)]
    body = [_stage_strip(trace), _legend(trace)]
    top = TOP + STAGE_H + 44
    height = top + sum(lane.height + LANE_GAP for lane in lanes) + 20
    body.append(_axis(span_s, top - 6, height - 16))
    for lane in lanes:
        body.append(_draw(lane, span_s, top))
        top += lane.height + LANE_GAP
    title = f"the room {trace.room}: {trace.outcome} after {human_seconds(trace.seconds)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="wf" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>{"".join(body)}</svg>'
    )


def waterfall_page(trace: Waterfall) -> str:
    """The drawing with its words, as a page that needs nothing from elsewhere."""
    title = f"Room {trace.room}"
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts_of(trace)
    )
    rows = "".join(_row(bar) for bar in trace.bars)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>
<style>:root{{color-scheme:light dark}}body{{font:14px/1.5 system-ui,sans-serif;margin:24px auto;
max-width:1100px;padding:0 16px}}svg{{width:100%;height:auto}}dl{{display:grid;
grid-template-columns:max-content 1fr;gap:2px 16px}}dt{{opacity:.65}}dd{{margin:0}}
table{{border-collapse:collapse;width:100%;font-variant-resolve_ip:tabular-nums}}
td,th{{text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid #8884}}</style>
<h1>{escape(title)}</h1><dl>{facts}</dl>{waterfall_svg(trace)}
<table><thead><tr><th>after<th>took<th>endpoint<th>step<th>peer<th>bytes<th></tr></thead>
<tbody>{rows}</tbody></table></html>
"""


def facts_of(trace: Waterfall) -> list[tuple[str, str]]:
    """What one wants to know first, in words."""
    took = trace.stages[trace.worst]
    share = took / trace.seconds if trace.seconds > 0 else 0.0
    facts = [
        ("outcome", f"{trace.outcome} after {human_seconds(trace.seconds)}"),
        ("most of it", f"{WORDS[trace.worst]}, {human_seconds(took)} ({share:.0%})"),
    ]
    if trace.failure:
        facts.append(("why", trace.failure))
    if trace.request:
        facts.append(("request", trace.request))
    if trace.traceparent:
        facts.append(("traceparent", trace.traceparent))
    facts.append(("clocks", clock_words(trace)))
    if trace.left_out:
        facts.append(("left out", f"{trace.left_out} steps for which there was no place"))
    return facts


def clock_words(trace: Waterfall) -> str:
    """How far the times of other endpoints may be off."""
    others = [one for one in trace.clocks if one.endpoint != trace.clock]
    known = [one.error_s for one in others if one.error_s is not None]
    unknown = [one.endpoint for one in others if one.error_s is None]
    words = f"drawn by {trace.clock}'s"
    if known:
        words += f"; others within {human_seconds(max(known))}"
    if unknown:
        words += f"; not measured: {', '.join(unknown)}"
    return words


# ---------------------------------------------------------------- parts


def _endpoints(bars: Iterable[WaterfallBar]) -> list[str]:
    roles = {bar.endpoint: bar.role for bar in bars}
    return sorted(roles, key=lambda name: (roles[name] != "source", name))


def _lane(endpoint: str, bars: Sequence[WaterfallBar]) -> _Lane:
    own = [bar for bar in bars if bar.endpoint == endpoint]
    rows: list[list[WaterfallBar]] = []
    for bar in (bar for bar in own if bar.step in SPANS):
        free = next((row for row in rows if row[-1].ended_s <= bar.begun_s), None)
        if free is None and len(rows) < MOST_ROWS:
            rows.append(free := [])
        (free if free is not None else rows[-1]).append(bar)
    return _Lane(endpoint, own[0].role, own, rows)


def _x(at_s: float, span_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at_s / span_s


def _stage_strip(trace: Waterfall) -> str:
    total, at, parts = trace.seconds or 1e-9, LEFT, []
    whole = WIDTH - LEFT - RIGHT
    for stage, seconds in trace.stages.items():
        wide = whole * seconds / total
        if wide > 0:
            tip = f"{WORDS[stage]}: {human_seconds(seconds)}, {seconds / total:.0%}"
            parts.append(
                f'<rect class="{stage}" x="{at:.1f}" y="{TOP}" width="{wide:.1f}" '
                f'height="{STAGE_H}"><title>{escape(tip)}</title></rect>'
            )
        at += wide
    label = f'<text x="0" y="{TOP + 17}" font-weight="600">where it went</text>'
    return label + "".join(parts)


def _legend(trace: Waterfall) -> str:
    at, parts, y = LEFT, [], TOP + STAGE_H + 18
    for stage, seconds in trace.stages.items():
        if seconds <= 0:
            continue
        words = escape(f"{WORDS[stage]} {human_seconds(seconds)}")
        parts.append(
            f'<rect class="{stage}" x="{at:.1f}" y="{y - 9}" width="10" height="10" rx="2"/>'
            f'<text class="num" x="{at + 15:.1f}" y="{y}">{words}</text>'
        )
        at += 15 + CHAR_W * len(words) + 22
    return "".join(parts)


def _axis(span_s: float, top: float, bottom: float) -> str:
    parts = []
    for i in range(6):
        x = _x(span_s * i / 5, span_s)
        parts.append(
            f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{bottom:.0f}"/>'
            f'<text class="soft num" x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="'
            f'{"end" if i == 5 else "middle"}">{escape(human_seconds(span_s * i / 5))}</text>'
        )
    return "".join(parts)


def _draw(lane: _Lane, span_s: float, top: float) -> str:
    parts = [
        f'<rect class="lane" x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT:.1f}" '
        f'height="{lane.height:.1f}" rx="4"/>',
        f'<text x="0" y="{top + 15:.1f}" font-weight="600">{escape(lane.endpoint[:22])}</text>',
        f'<text class="soft" x="0" y="{top + 30:.1f}">{_role_word(lane.role)}</text>',
        *_marks(lane.bars, span_s, top),
    ]
    for place, row in enumerate(lane.rows):
        y = top + LANE_HEAD + place * (BAR_H + BAR_GAP)
        parts += [_span(bar, span_s, y) for bar in row]
    return f"<g>{''.join(parts)}</g>"


def _role_word(role: str) -> str:
    return "prefill" if role == "source" else "decode"


def _marks(bars: Iterable[WaterfallBar], span_s: float, top: float) -> list[str]:
    parts, free_from = [], 0.0
    for bar in bars:
        if bar.step in SPANS:
            continue
        x, kind = _x(bar.ended_s, span_s), str(bar.step)
        parts.append(
            f'<circle class="mark {kind}" cx="{x:.1f}" cy="{top + 7:.1f}" r="3">'
            f"<title>{escape(words_of(bar))}</title></circle>"
        )
        wide = CHAR_W * len(kind)
        left = min(x - 2, WIDTH - RIGHT - wide)
        if bar.step in NAMED and left >= free_from:
            parts.append(
                f'<text class="soft" font-size="10" x="{left:.1f}" y="{top + 21:.1f}">{kind}</text>'
            )
            free_from = left + wide + 4
    return parts


def _span(bar: WaterfallBar, span_s: float, y: float) -> str:
    x, end = _x(bar.begun_s, span_s), _x(bar.ended_s, span_s)
    return (
        f'<rect class="{SPANS[bar.step]}" x="{x:.1f}" y="{y:.1f}" width="{max(1.5, end - x):.1f}" '
        f'height="{BAR_H}" rx="2"><title>{escape(words_of(bar))}</title></rect>'
    )


def words_of(bar: WaterfallBar) -> str:
    """A step in words."""
    peer = f" {'from' if bar.heard else 'to'} {bar.peer}" if bar.peer else ""
    words = f"{human_seconds(bar.ended_s)}: {bar.step}{peer}"
    if bar.ended_s > bar.begun_s:
        words += f", took {human_seconds(bar.ended_s - bar.begun_s)}"
    if bar.num_bytes:
        words += f", {human_bytes(bar.num_bytes)}"
    return words + (f", {bar.mode}" if bar.mode else "") + (f", {bar.detail}" if bar.detail else "")


def _row(bar: WaterfallBar) -> str:
    took = human_seconds(bar.ended_s - bar.begun_s) if bar.ended_s > bar.begun_s else ""
    size = human_bytes(bar.num_bytes) if bar.num_bytes else ""
    more = " ".join(filter(None, (bar.mode, bar.detail)))
    cells = (human_seconds(bar.begun_s), took, bar.endpoint, str(bar.step), bar.peer, size, more)
    return f"<tr>{''.join(f'<td>{escape(cell)}' for cell in cells)}</tr>"
