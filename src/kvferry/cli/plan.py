"""``kvferry plan``: show who sends what to whom for a pair of layouts."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.cli.files import read_config, write_text
from kvferry.cli.parsing import fields, given, number, show, whole
from kvferry.cli.plan_output import as_document, print_document, print_plan, print_refusal
from kvferry.cli.sides import SideFields, Sides, add_flags, both_sides
from kvferry.errors import InputError, Refused
from kvferry.layout import CacheSpec, DType, Order, Parallel, attention
from kvferry.layout.hf import spec_from_config
from kvferry.plan import PRESETS, Constants, Path, Request, check, estimate, reshard
from kvferry.plan.picture import as_html, as_svg

EXIT_REFUSED = 3

EXAMPLE = """example:
  kvferry plan --prefill tp=4 --decode tp=1,dp=4,page=16 \\
      --layers 64 --kv-heads 8 --head-dim 128 --dtype bfloat16 --tokens 8192
  kvferry plan --prefill tp=4,pp=2 --decode tp=8,prefix=1000 --model path/to/config.json \\
      --html plan.html

side keys: tp, pp, cp (token interleaving), dp (replicas), page (tokens), order (nhd or hnd),
stages (layers of each pipeline stage, as in stages=10+22), dtype (of that side's cache),
and for decode also prefix (tokens already cached there).

paths: runs (a descriptor for each page, neighbouring pages merged; open only where a full page
is one piece on both sides), slices (one for each contiguous piece), staged (gathered into slots).
In --json each path has "pieces", also one that is not open; then "open" is false.
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
        "--link",
        default="nixl-host",
        metavar="NAME",
        help=f"constants of the transport: {', '.join(PRESETS)}; any may be overridden, "
        f"as in nixl-host,gb_per_s=46,copy_gb_per_s=1700,descriptor_us=1",
    )
    parser.add_argument(
        "--path",
        choices=["auto", *(path.value for path in Path)],
        default="auto",
        help="force a path",
    )
    parser.add_argument(
        "--pages",
        choices=["scattered", "neighbours"],
        default="scattered",
        help="whether a request's pages lie apart (a busy server) or side by side",
    )
    parser.add_argument("--all", action="store_true", help="show every move, however many")
    parser.add_argument("--svg", metavar="FILE", help="write a picture")
    parser.add_argument("--html", metavar="FILE", help="write a picture with numbers on hover")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan, prove, print."""
    prefill = read_side(args.prefill, "--prefill")
    decode = read_side(args.decode, "--decode", extra={"prefix": whole("prefix", least=0)})
    request = Request(whole("--tokens", least=0)(args.tokens), decode.prefix)
    constants = read_link(args.link)
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
        print_refusal(refused.reasons, heading="These two do not fit:", as_json=args.json)
        return EXIT_REFUSED
    check(plan)
    costs = estimate(
        plan,
        request,
        constants,
        scattered=args.pages == "scattered",
        override=None if args.path == "auto" else Path(args.path),
    )
    for name, draw in pictures:
        write_text(name, draw(plan, request))
    if args.json:
        print_document(as_document(plan, request, costs))
    else:
        print_plan(plan, request, costs, link=args.link, show_all=args.all)
        for name, _ in pictures:
            print(f"picture: {name}")
    return 0


def read_side(text: str, flag: str, extra: dict[str, Any] | None = None) -> SideFields:
    """Read ``tp=4,pp=2,...`` into what a ``Layout`` takes."""
    if not text.strip(" ,"):
        raise InputError(f"{flag} is empty; give at least one key, as in tp=1")
    readers: dict[str, Any] = {
        **{key: whole(f"{flag} {key}") for key in ("tp", "pp", "cp", "dp", "page")},
        "order": _read_order,
        "stages": lambda text: tuple(whole("a stage")(part) for part in text.split("+")),
        "dtype": DType.parse,
        **(extra or {}),
    }
    values = fields(text, readers, flag)
    if "stages" in values:
        values.setdefault("pp", len(values["stages"]))
    sharding = Parallel(**{k: values[k] for k in ("tp", "pp", "cp", "stages") if k in values})
    names = {"dp": "dp", "page": "page_tokens", "order": "order"}
    rest = {names[key]: values[key] for key in names if key in values}
    layout = {"sharding": sharding, **rest}
    return SideFields(layout, values.get("dtype"), values.get("prefix", 0))


def _read_order(text: str) -> Order:
    try:
        return Order(text.lower())
    except ValueError:
        raise InputError(f"order must be nhd or hnd, not {show(text)}") from None


def read_spec(args: argparse.Namespace, side_dtype: DType | None) -> CacheSpec:
    """The cache, from a model's configuration or from the four flags."""
    dtype = side_dtype or _read_dtype("--dtype", args.dtype)
    state_dtype = _read_dtype("--state-dtype", args.state_dtype)
    shape = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    stated = [flag for flag, value in shape.items() if value is not None]
    if given("--model", args.model) is not None:
        stated += ["--v-head-dim"] if args.v_head_dim is not None else []
        if stated:
            raise InputError(f"--model already says what {', '.join(stated)} would; drop one")
        return spec_from_config(read_config(args.model), dtype, state_dtype)
    if state_dtype is not None:
        raise InputError("--state-dtype is for a --model with recurrent state; drop it")
    missing = [flag for flag in shape if flag not in stated]
    if missing:
        raise InputError(f"{', '.join(missing)} missing; give them, or --model with a config.json")
    v_head_dim = args.v_head_dim
    return attention(
        layers=whole("--layers", least=0)(args.layers),
        kv_heads=whole("--kv-heads", least=0)(args.kv_heads),
        head_dim=whole("--head-dim", least=0)(args.head_dim),
        v_head_dim=None if v_head_dim is None else whole("--v-head-dim", least=0)(v_head_dim),
        dtype=dtype or DType.BFLOAT16,
    )


def _read_dtype(flag: str, text: str | None) -> DType | None:
    return None if given(flag, text) is None or text is None else DType.parse(text)


def read_link(text: str) -> Constants:
    """A preset by name, with any of its constants overridden."""
    name, _, rest = text.partition(",")
    if name not in PRESETS:
        raise InputError(f"no constants for the link {show(name)}; use one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    readers = {
        "descriptor_us": number("descriptor_us", 1e-6, 1e6),
        "gb_per_s": number("gb_per_s", 1e-6, 1e6),
        "copy_gb_per_s": number("copy_gb_per_s", 1e-6, 1e6),
    }
    values = fields(rest, readers, "--link")
    return Constants(
        descriptor_s=values.get("descriptor_us", preset.descriptor_s * 1e6) / 1e6,
        bytes_per_s=values.get("gb_per_s", preset.bytes_per_s / 1e9) * 1e9,
        copy_bytes_per_s=values.get("copy_gb_per_s", preset.copy_bytes_per_s / 1e9) * 1e9,
        slot_bytes=preset.slot_bytes,
        slot_s=preset.slot_s,
        maps_peer=preset.maps_peer,
    )
