"""``kvferry plan``: show who sends what to whom for a pair of layouts."""

from __future__ import annotations

import argparse
from typing import Any

from msgspec.structs import replace

from kvferry.cli.files import write_text
from kvferry.cli.parsing import fields, given, number, show, whole
from kvferry.cli.plan import capacity
from kvferry.cli.plan.output import as_document, print_advice, print_plan
from kvferry.cli.printing import EXIT_REFUSED, print_document, print_refusal
from kvferry.cli.sides import Sides, add_flags, both_sides, read_side, read_spec
from kvferry.errors import InputError, Refused
from kvferry.plan import PRESETS, LinkCost, Request, TransferMode, check, estimate, reshard
from kvferry.plan.layers import layers_for
from kvferry.plan.pictures import as_html, as_svg

# Fields of LinkCost that --cost-model may override, with the unit of each.
COST_KEYS = {
    "descriptor_us": ("descriptor_s", 1e-6),
    "gb_per_s": ("bytes_per_s", 1e9),
    "copy_gb_per_s": ("copy_bytes_per_s", 1e9),
    "room_us": ("room_s", 1e-6),
}

EXAMPLE = """example:
  kvferry plan --prefill tp=4 --decode tp=1,dp=4,page=16 \\
      --layers 64 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 8192
  kvferry plan --prefill tp=4,pp=2 --decode tp=8,prefix=1000 --model path/to/config.json \\
      --html plan.html
  kvferry plan --prefill tp=4 --decode tp=8 --layers 80 --kv-heads 8 --head-dim 128 \\
      --tokens 4096 --cost-model rdma-400g --layer-ms 2.5
  kvferry plan --prefill tp=4 --decode tp=8 --layers 80 --kv-heads 8 --head-dim 128 \\
      --cost-model rdma-400g --load 20,4000,300 --instances 8x4 --plot load.svg

side keys: tp, pp, cp (token interleaving), dp (replicas), page (tokens), order (nhd or hnd),
stages (layers of each pipeline stage, as in stages=10+22), dtype (of that side's cache),
and for decode also prefix (tokens already cached there).

modes: runs (a descriptor for each run of adjacent pages; open only if a full page is one piece on
both sides), slices (one for each contiguous piece), staged (gathered into slots).
In --json each mode has "pieces", even if it is not open; then "open" is false.
"""


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "plan",
        help="show who sends what to whom for a pair of layouts",
        description="Show who sends what to whom when prefill and decode shard differently.",
        epilog=EXAMPLE,
    )
    add_flags(parser, required=True, tokens=8192)
    parser.add_argument(
        "--cost-model",
        default="nixl-host",
        metavar="NAME",
        help=f"costs of the transport: {', '.join(PRESETS)}; any may be overridden, "
        f"as in nixl-host,gb_per_s=46,copy_gb_per_s=1700,descriptor_us=1",
    )
    parser.add_argument(
        "--mode",
        choices=["auto", *(mode.value for mode in TransferMode)],
        default="auto",
        help="force a transfer mode",
    )
    parser.add_argument(
        "--pages",
        choices=["scattered", "neighbours"],
        default="scattered",
        help="whether a request's pages are apart (a busy server) or adjacent",
    )
    parser.add_argument(
        "--layer-ms",
        metavar="MS",
        help="time to compute one layer of these tokens: advise how many layers to push at a time",
    )
    capacity.add_flags(parser)
    parser.add_argument("--all", action="store_true", help="show every move, however many")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--html", metavar="FILE", help="write a picture with numbers on hover")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make, check and print a plan."""
    prefill = read_side(args.prefill, "--prefill")
    decode = read_side(args.decode, "--decode", extra={"prefix": whole("prefix", least=0)})
    asked = capacity.read_flags(args)
    num_tokens = whole("--tokens", least=0)(args.tokens)
    request = Request(asked.load.num_input if asked else num_tokens, decode.prefix)
    link_cost = read_cost_model(args.cost_model)
    layer_ms = None if args.layer_ms is None else number("--layer-ms", 0, 1e6)(args.layer_ms)
    pictures = [
        (name, draw)
        for flag, name, draw in (("--svg", args.svg, as_svg), ("--html", args.html, as_html))
        if given(flag, name) is not None
    ]
    sides = both_sides(lambda side: read_spec(args, side.dtype), prefill, decode)
    if not isinstance(sides, Sides):
        print_refusal(sides, heading="This can't work:", as_json=args.json)
        return EXIT_REFUSED
    try:
        plan = reshard(*sides)
    except Refused as refused:
        print_refusal(refused.reasons, heading="The two sides do not fit:", as_json=args.json)
        return EXIT_REFUSED
    check(plan)
    costs = estimate(
        plan,
        request,
        link_cost,
        scattered=args.pages == "scattered",
        override=None if args.mode == "auto" else TransferMode(args.mode),
    )
    advice = None if layer_ms is None else layers_for(costs, layer_ms / 1e3)
    report = capacity.CapacityReport.of(asked.load, costs) if asked else None
    for name, draw in pictures:
        write_text(name, draw(plan, request))
    if asked and report and asked.plot:
        capacity.draw(asked.plot, report)
        pictures.append((str(asked.plot), as_svg))
    if args.json:
        document = as_document(plan, request, costs, advice)
        more = {} if report is None else {"capacity": capacity.as_document(report, link_cost)}
        print_document(document | more)
    else:
        print_plan(plan, request, costs, cost_model=args.cost_model, show_all=args.all)
        if advice is not None:
            print_advice(advice)
        if report is not None:
            capacity.print_report(report, link_cost)
        for name, _ in pictures:
            print(f"picture: {name}")
    return 0


def read_cost_model(text: str) -> LinkCost:
    """Return a preset by name, with any of its costs overridden."""
    name, _, rest = text.partition(",")
    if name not in PRESETS:
        raise InputError(f"no cost model {show(name)}; use one of {', '.join(PRESETS)}")
    readers = {key: number(key, 1e-6, 1e6) for key in COST_KEYS}
    values = fields(rest, readers, "--cost-model")
    overridden = {COST_KEYS[key][0]: value * COST_KEYS[key][1] for key, value in values.items()}
    return replace(PRESETS[name], **overridden)
