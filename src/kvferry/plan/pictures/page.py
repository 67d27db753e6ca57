"""An HTML page around the drawing: numbers on hover, a table of the moves.

The page needs nothing from elsewhere. Without scripts it is the static picture,
whose own ``<title>`` elements give the numbers; the script replaces those with
a tooltip and lets a band, a card or a row of the table light up what it names.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.plan.pictures.parts import Row, Scene
from kvferry.plan.pictures.svg import FONT, drawing, escape
from kvferry.plan.pictures.words import COLUMNS

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
  font-variant-resolve_ip: tabular-nums; }}
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
(() => {
  const svg = document.querySelector("svg.kvf");
  const tip = document.getElementById("tip");
  const bands = [...svg.querySelectorAll(".band")];
  const rows = [...document.querySelectorAll("tr[data-move]")];
  const tips = new Map();
  const marks = ["from", "to"].map(() => {
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    mark.setAttribute("class", "mark");
    mark.setAttribute("visibility", "hidden");
    return svg.appendChild(mark);
  });

  const place = (mark, box) => {
    mark.setAttribute("visibility", box ? "visible" : "hidden");
    ["x", "y", "width", "height"].forEach((name, i) =>
      mark.setAttribute(name, box ? box.split(" ")[i] : 0));
  };
  let current = null;
  const clear = () => {
    current = null;
    svg.classList.remove("lit");
    document.querySelectorAll(".on").forEach((one) => one.classList.remove("on"));
    marks.forEach((mark) => place(mark, null));
    tip.hidden = true;
  };
  const partsOf = (it) => {
    if (it.classList.contains("card"))
      return bands.filter((band) => band.dataset[it.dataset.side] === it.dataset.rank);
    return bands.filter((band) => band.dataset.move === it.dataset.move);
  };
  const cardsOf = (band) => ["source", "target"].map((side) => svg.querySelector(
    `.card[data-side="${side}"][data-rank="${band.dataset[side]}"]`));
  const light = (it) => {
    clear();
    current = it;
    const lit = partsOf(it);
    if (lit.length) svg.classList.add("lit");
    it.classList.add("on");
    for (const band of lit) {
      band.classList.add("on");
      cardsOf(band).forEach((card) => card && card.classList.add("on"));
    }
    if (!it.classList.contains("card") && lit.length) {
      place(marks[0], lit[0].dataset.from);
      place(marks[1], lit[0].dataset.to);
      rows.forEach((row) => row.classList.toggle("on", row.dataset.move === it.dataset.move));
    }
    tip.textContent = tips.get(it) || "";
    tip.hidden = !tip.textContent;
  };
  const show = (it, x, y) => {
    if (it !== current) light(it);
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = Math.max(8, Math.min(x + 16, innerWidth - wide - 8)) + "px";
    tip.style.top = Math.max(8, y + 16 + high > innerHeight ? y - high - 12 : y + 16) + "px";
  };
  const middle = (it) => {
    const box = it.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
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
    it.addEventListener("pointerleave", clear);
    it.addEventListener("focus", () => show(it, ...middle(it)));
    it.addEventListener("blur", clear);
  }
  svg.setAttribute("role", "group");
  addEventListener("keydown", (event) => event.key === "Escape" && clear());
})();
"""


def page(scene: Scene) -> str:
    """A complete page for one scene."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(scene.title)} · kvferry plan</title>",
        f"<style>{_STYLE}</style></head>",
        f"<body><main>{drawing(scene)}",
        *_table(scene),
        f'</main><div id="tip" role="status" hidden></div><script>{_SCRIPT}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _table(scene: Scene) -> Iterator[str]:
    if not scene.rows:
        return
    heads = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    yield f"<table><caption>Moves</caption><thead><tr>{heads}</tr></thead><tbody>"
    for row in scene.rows:
        yield _row(row)
    yield "</tbody></table>"
    if scene.more_rows:
        yield f'<p class="more">{escape(scene.more_rows)}</p>'


def _row(row: Row) -> str:
    cells = "".join(f"<td>{escape(text)}</td>" for text in row.texts)
    return f'<tr data-move="{row.index}">{cells}</tr>'
