"""Command-line flags for the two sides of a transfer, their cache and a request."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvferry.cli.parsing import fields, given, show, whole
from kvferry.errors import InputError, Reason, Refused
from kvferry.layout import CacheSpec, DType, Layout, Order, Parallel, attention, mismatches
from kvferry.layout.hf import spec_from_config
from kvferry.layout.spec import CacheFormat, parse_cache_type
from kvferry.model_config import read_config


def add_flags(parser: argparse.ArgumentParser, *, required: bool, tokens: int) -> None:
    """Add the flags that describe two sides, their cache and a request."""
    for flag, example in (("--prefill", "tp=4,page=64"), ("--decode", "tp=1,dp=4,page=16")):
        parser.add_argument(flag, required=required, metavar="SIDE", help=f"as in {example}")
    for flag, metavar, text in (
        ("--model", "PATH", "a Hugging Face config.json or its folder"),
        ("--layers", "N", "number of layers, without --model"),
        ("--kv-heads", "N", "KV heads of the whole model"),
        ("--head-dim", "N", "elements per head"),
        ("--v-head-dim", "N", "elements per V head if different"),
        ("--dtype", "T", "cache dtype (default: the model's, or bf16)"),
        ("--state-dtype", "T", "dtype of recurrent state (default: the config's, or float32)"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    text = f"prompt length ({tokens})"
    parser.add_argument("--tokens", default=str(tokens), metavar="N", help=text)


# ``page.GROUP``, the page of one group.
_GROUP_PAGE = re.compile(r"\bpage\.[^=,]+(?==)")
_SIZES = ("tp", "pp", "cp", "dcp", "interleave", "copies")


class SideFields(NamedTuple):
    """One side as given on the command line: arguments of its ``Layout``, dtype and prefix."""

    layout: dict[str, Any]
    dtype: DType | CacheFormat | None
    prefix: int


class Sides(NamedTuple):
    """The two layouts of a pair."""

    prefill: Layout
    decode: Layout


def read_side(text: str, flag: str, extra: dict[str, Any] | None = None) -> SideFields:
    """Parse a side such as ``tp=4,pp=2``."""
    if not text.strip(" ,"):
        raise InputError(f"{flag} is empty; give at least one key, as in tp=1")
    readers: dict[str, Any] = {
        **{key: whole(f"{flag} {key}") for key in (*_SIZES, "dp", "page")},
        "order": _read_order,
        **{key: whole(f"{flag} {key}") for key in _GROUP_PAGE.findall(text)},
        "stages": lambda text: tuple(whole("a stage")(part) for part in text.split("+")),
        "dtype": parse_cache_type,
        **(extra or {}),
    }
    values = fields(text, readers, flag)
    if "stages" in values:
        values.setdefault("pp", len(values["stages"]))
    sharding = Parallel(**{k: values[k] for k in (*_SIZES, "stages") if k in values})
    if "interleave" in values and sharding.num_token_shares == 1:
        raise InputError(f"{flag} has an interleave but no context parallelism; add cp or dcp")
    names = {"dp": "dp", "page": "page_tokens", "order": "order"}
    rest = {names[key]: values[key] for key in names if key in values}
    own = tuple((key[5:], values[key]) for key in values if key.startswith("page."))
    layout = {"sharding": sharding, "group_pages": own, **rest}
    return SideFields(layout, values.get("dtype"), values.get("prefix", 0))


def _read_order(text: str) -> Order:
    try:
        return Order(text.lower())
    except ValueError:
        raise InputError(f"order must be nhd or hnd, not {show(text)}") from None


def read_spec(args: argparse.Namespace, side_dtype: DType | CacheFormat | None) -> CacheSpec:
    """Return the cache of one side, from a model's configuration or from the flags of its shape."""
    stated_type = given("--dtype", args.dtype)
    dtype = side_dtype or (None if stated_type is None else parse_cache_type(stated_type))
    state_dtype = _read_dtype("--state-dtype", args.state_dtype)
    shape = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    stated = [flag for flag, value in shape.items() if value is not None]
    if given("--model", args.model) is not None:
        stated += ["--v-head-dim"] if args.v_head_dim is not None else []
        if stated:
            raise InputError(f"--model conflicts with {', '.join(stated)}; drop one")
        return spec_from_config(read_config(args.model), dtype, state_dtype)
    if state_dtype is not None:
        raise InputError("--state-dtype is for a --model with recurrent state; drop it")
    missing = [flag for flag in shape if flag not in stated]
    if missing:
        raise InputError(f"{', '.join(missing)} missing; give them, or --model with a config.json")
    if isinstance(dtype, CacheFormat):
        raise InputError(f"{dtype} is a form of MLA latents; give the --model, or use fp8")
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


def both_sides(
    spec_of: Callable[[SideFields], CacheSpec], prefill: SideFields, decode: SideFields
) -> Sides | tuple[Reason, ...]:
    """Return two layouts, or every reason why a side or the pair is refused."""
    specs: list[CacheSpec] = []
    layouts: list[Layout] = []
    refused: dict[str, tuple[Reason, ...]] = {"prefill": (), "decode": ()}
    for name, side in (("prefill", prefill), ("decode", decode)):
        try:
            spec = spec_of(side)
            specs.append(spec)
            layouts.append(Layout(spec, **side.layout))
        except Refused as error:
            refused[name] = error.reasons
    if len(layouts) == 2:
        return Sides(*layouts)
    shared = tuple(reason for reason in refused["prefill"] if reason in refused["decode"])
    own = tuple(
        replace(reason, message=f"{name}: {reason.message}")
        for name, reasons in refused.items()
        for reason in reasons
        if reason not in shared
    )
    pair = mismatches(*specs) if len(specs) == 2 else ()
    return shared + own + pair
