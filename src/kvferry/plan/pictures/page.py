"""An HTML page around the drawing: numbers on hover, and a table of the moves.

The page loads nothing. Without scripts it is the static picture, whose ``<title>`` elements
give the numbers. The script turns those into a tooltip, and highlights what a band, a card or
a row of the table refers to.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.plan.pictures import captions
from kvferry.plan.pictures.scene import Scene
from kvferry.plan.pictures.svg import FONT, drawing, escape
from kvferry.plan.plan import Plan, Request

MAX_ROWS = 200

_STYLE = f"""
body {{ margin: 0; background: #ffffff; color: #1c2430; font: 14px/1.45 {FONT}; }}
main {{ max-width: 1400px; margin: 0 auto; padding: 0 0 48px; }}
main .kvf {{ display: block; width: 100%; height: auto; }}
main .kvf .band, main .kvf .card {{ transition: opacity 0.12s; cursor: default; }}
main .kvf.lit .band:not(.on) {{ opacity: 0.07; }}
main .kvf .band.on path {{ fill-opacity: 0.92; }}
main .kvf .card.on .box {{ stroke: #1c2430; stroke-width: 1.6; }}
#tip {{ position: fixed; z-index: 1; pointer-events: none; max-width: 320px;
  padding: 9px 13px; border-radius: 8px; background: #1c2430; color: #f4f6f9;
  white-space: pre-line; box-shadow: 0 6px 24px rgb(0 0 0 / 25%); }}
#tip::first-line {{ font-weight: 700; }}
table {{ border-collapse: collapse; margin: 8px 36px; width: calc(100% - 72px); }}
caption {{ text-align: left; font-weight: 600; font-size: 15px; padding: 8px 0; }}
th, td {{ text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid #e3e8ee;
  font-variant-numeric: tabular-nums; }}
th {{ color: #566071; font-weight: 600; }}
th:nth-last-child(-n+2), td:nth-last-child(-n+2) {{ text-align: right; padding-right: 0; }}
tbody tr.on {{ background: #eef1f5; }}
"""

_SCRIPT = """
const svg = document.querySelector("svg.kvf");
const tip = document.getElementById("tip");
const items = [...document.querySelectorAll(".band, .card, tr[data-move]")];

function clear() {
  svg.classList.remove("lit");
  items.forEach((it) => it.classList.remove("on"));
  tip.hidden = true;
}
function show(it, text, x, y) {
  clear();
  const { move, side, rank } = it.dataset;
  const related = items.filter(({ dataset }) =>
    side ? dataset[side] === rank : dataset.move === move);
  svg.classList.toggle("lit", related.some((one) => one.matches(".band")));
  for (const one of [it, ...related]) one.classList.add("on");
  tip.textContent = text;
  tip.hidden = !text;
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = Math.max(8, Math.min(x + 16, innerWidth - wide - 8)) + "px";
  tip.style.top = Math.max(8, y + 16 + high > innerHeight ? y - high - 12 : y + 16) + "px";
}
for (const it of items) {
  const text = it.querySelector("title")?.textContent || "";
  // The browser would show a title as a second tooltip.
  it.querySelector("title")?.remove();
  if (text) it.setAttribute("aria-label", text);
  it.addEventListener("pointermove", (event) => show(it, text, event.clientX, event.clientY));
  it.addEventListener("pointerleave", clear);
}
"""


def as_html(plan: Plan, request: Request) -> str:
    """Return an HTML page with the picture, numbers on hover and a table of the moves."""
    scene = Scene(plan, request)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(captions.title(plan))} · kvferry plan</title>",
        f"<style>{_STYLE}</style></head>",
        f"<body><main>{drawing(scene)}",
        *(_table(scene) if scene.carried else ()),
        '</main><div id="tip" role="status" hidden></div>',
        f'<script type="module">{_SCRIPT}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _table(scene: Scene) -> Iterator[str]:
    head = "".join(f'<th scope="col">{name}</th>' for name in captions.TABLE_COLUMNS)
    num_moves = captions.plural(len(scene.carried), "move")
    caption = f"The first {MAX_ROWS} of {num_moves}" if len(scene.carried) > MAX_ROWS else num_moves
    yield f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>"
    for carried in scene.carried[:MAX_ROWS]:
        texts = captions.move_texts(scene, carried)
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        yield f'<tr data-move="{carried.number}">{cells}</tr>'
    yield "</tbody></table>"
