"""The two sides as the user typed them, built together so that every reason is told at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvferry.cli.parsing import fields, given, show, whole
from kvferry.errors import InputError, Reason, Refused
from kvferry.layout import CacheSpec, DType, Layout, Order, Parallel, attention, mismatches
from kvferry.layout.hf import spec_from_config
from kvferry.model_config import read_config


def add_flags(parser: argparse.ArgumentParser, *, required: bool, tokens: int) -> None:
    """The flags that describe two sides, their cache and a request."""
    parser.add_argument("--prefill", required=required, metavar="SIDE", help="as in tp=4,page=64")
    parser.add_argument(
        "--decode", required=required, metavar="SIDE", help="as in tp=1,dp=4,page=16"
    )
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face config.json or its folder")
    parser.add_argument("--layers", metavar="N", help="layers, where no --model is given")
    parser.add_argument("--kv-heads", metavar="N", help="KV heads of the whole model")
    parser.add_argument("--head-dim", metavar="N", help="elements per head")
    parser.add_argument("--v-head-dim", metavar="N", help="elements per V head where they differ")
    parser.add_argument("--dtype", metavar="T", help="cache dtype (default: the model's, or bf16)")
    parser.add_argument(
        "--state-dtype",
        metavar="T",
        help="dtype of recurrent state (default: as the config says, or float32)",
    )
    parser.add_argument(
        "--tokens", default=str(tokens), metavar="N", help=f"prompt length ({tokens})"
    )


class SideFields(NamedTuple):
    """One side as the user typed it."""

    layout: dict[str, Any]
    dtype: DType | None
    prefix: int


class Sides(NamedTuple):
    """The two layouts of a pair."""

    prefill: Layout
    decode: Layout


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


class _Attempt(NamedTuple):
    """How far building one side went, and why no further."""

    spec: CacheSpec | None
    layout: Layout | None
    reasons: tuple[Reason, ...]


def both_sides(
    spec_of: Callable[[SideFields], CacheSpec], prefill: SideFields, decode: SideFields
) -> Sides | tuple[Reason, ...]:
    """Two layouts, or everything that is wrong with either of them and with the pair."""
    ours, theirs = _attempt(spec_of, prefill), _attempt(spec_of, decode)
    if ours.layout is not None and theirs.layout is not None:
        return Sides(ours.layout, theirs.layout)
    reasons = _told_once(ours.reasons, theirs.reasons)
    if ours.spec is not None and theirs.spec is not None:
        reasons += mismatches(ours.spec, theirs.spec)
    return reasons


def _attempt(spec_of: Callable[[SideFields], CacheSpec], side: SideFields) -> _Attempt:
    spec = None
    try:
        spec = spec_of(side)
        return _Attempt(spec, Layout(spec, **side.layout), ())
    except Refused as refused:
        return _Attempt(spec, None, refused.reasons)


def _told_once(prefill: tuple[Reason, ...], decode: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """What both sides suffer from once, then each side's own reasons under its name."""
    shared = tuple(reason for reason in prefill if reason in decode)
    own = tuple(
        replace(reason, message=f"{side}: {reason.message}")
        for side, reasons in (("prefill", prefill), ("decode", decode))
        for reason in reasons
        if reason not in shared
    )
    return shared + own
