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

MAX_ROWS = 200

_STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ margin: 0; background: #ffffff; color: #1c2430; font: 14px/1.45 {FONT}; }}
main {{ max-width: 1400px; margin: 0 auto; padding: 0 0 48px; }}
main .kvf {{ display: block; width: 100%; height: auto; }}
main .kvf .band, main .kvf .card {{ transition: opacity 0.12s; outline: none; cursor: default; }}
main .kvf.lit .band:not(.on) {{ opacity: 0.07; }}
main .kvf .band.on path {{ fill-opacity: 0.92; }}
main .kvf .card.on .box {{ stroke: #1c2430; stroke-width: 1.6; }}
main .kvf .mark {{ fill: none; stroke: #1c2430; stroke-width: 2; pointer-events: none; }}
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
tbody tr:hover, tbody tr.on {{ background: #eef1f5; }}
.more {{ margin: 8px 36px; color: #566071; }}
@media (prefers-color-scheme: dark) {{
  body, main .kvf .paper {{ background: #11161d; fill: #11161d; }}
  body {{ color: #e6eaf0; }}
  main .kvf text {{ fill: #e6eaf0; }}
  main .kvf .subtitle, main .kvf .muted {{ fill: #a3aebd; }}
  main .kvf .box {{ fill: #1a212b; stroke: #364152; }}
  main .kvf .void {{ fill: #262f3c; }}
  main .kvf .held {{ fill: #364152; }}
  main .kvf .gone {{ fill: #161c25; stroke: #5b6778; }}
  main .kvf .hatch {{ stroke: #11161d; }}
  main .kvf .mark, main .kvf .card.on .box {{ stroke: #f4f6f9; }}
  #tip {{ background: #e6eaf0; color: #11161d; }}
  th, td {{ border-color: #2a3442; }}
  th, .more {{ color: #a3aebd; }}
  tbody tr:hover, tbody tr.on {{ background: #1f2732; }}
}}
"""

_SCRIPT = """
"use strict";
const svg = document.querySelector("svg.kvf");
const tip = document.getElementById("tip");
const bands = [...svg.querySelectorAll(".band")];
const rows = [...document.querySelectorAll("tr[data-move]")];
const tips = new Map();
const marks = ["from", "to"].map(() => {
  const mark = document.createElementNS(svg.namespaceURI, "rect");
  mark.setAttribute("class", "mark");
  return svg.appendChild(mark);
});
let current = null;

function place(mark, box) {
  mark.setAttribute("visibility", box ? "visible" : "hidden");
  (box || "0 0 0 0").split(" ").forEach((value, i) =>
    mark.setAttribute(["x", "y", "width", "height"][i], value));
}
function clear() {
  current = null;
  svg.classList.remove("lit");
  document.querySelectorAll(".on").forEach((one) => one.classList.remove("on"));
  marks.forEach((mark) => place(mark, null));
  tip.hidden = true;
}
function highlight(it) {
  clear();
  current = it;
  const { move, side, rank } = it.dataset;
  const lit = bands.filter((b) => side ? b.dataset[side] === rank : b.dataset.move === move);
  svg.classList.toggle("lit", lit.length > 0);
  for (const one of [it, ...lit]) one.classList.add("on");
  for (const band of lit)
    for (const end of ["source", "target"])
      svg.querySelector(`.card[data-side="${end}"][data-rank="${band.dataset[end]}"]`)
        ?.classList.add("on");
  if (move && lit.length) {
    place(marks[0], lit[0].dataset.from);
    place(marks[1], lit[0].dataset.to);
  }
  rows.forEach((row) => move && row.classList.toggle("on", row.dataset.move === move));
  tip.textContent = tips.get(it) || "";
  tip.hidden = !tip.textContent;
}
function show(it, x, y) {
  if (it !== current) highlight(it);
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = Math.max(8, Math.min(x + 16, innerWidth - wide - 8)) + "px";
  tip.style.top = Math.max(8, y + 16 + high > innerHeight ? y - high - 12 : y + 16) + "px";
}
for (const it of [...bands, ...svg.querySelectorAll(".card"), ...rows]) {
  const title = it.querySelector("title");
  if (title) {
    tips.set(it, title.textContent);
    it.setAttribute("aria-label", title.textContent);
    it.setAttribute("role", "img");
    title.remove();
  }
  it.setAttribute("tabindex", "0");
  it.addEventListener("pointermove", (event) => show(it, event.clientX, event.clientY));
  it.addEventListener("focus", () => {
    const box = it.getBoundingClientRect();
    show(it, box.x + box.width / 2, box.y + box.height / 2);
  });
  for (const end of ["pointerleave", "blur"]) it.addEventListener(end, clear);
}
svg.setAttribute("role", "group");
addEventListener("keydown", (event) => event.key === "Escape" && clear());
"""


def page(scene: Scene) -> str:
    """Return a complete HTML document for a scene."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(captions.title(scene.plan))} · kvferry plan</title>",
        f"<style>{_STYLE}</style></head>",
        f"<body><main>{drawing(scene)}",
        *_table(scene),
        '</main><div id="tip" role="status" hidden></div>',
        f'<script type="module">{_SCRIPT}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _table(scene: Scene) -> Iterator[str]:
    if not scene.carried:
        return
    head = "".join(f'<th scope="col">{name}</th>' for name in captions.TABLE_COLUMNS)
    yield f"<table><caption>Moves</caption><thead><tr>{head}</tr></thead><tbody>"
    total = scene.num_bytes()
    for number, move, num_bytes in scene.carried[:MAX_ROWS]:
        texts = captions.move_texts(scene.plan, move, scene.request, num_bytes, total)
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        yield f'<tr data-move="{number}">{cells}</tr>'
    yield "</tbody></table>"
    left = len(scene.carried) - MAX_ROWS
    if left > 0:
        yield f'<p class="more">… and {captions.plural(left, "more move")}.</p>'
