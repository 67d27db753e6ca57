"""Both sides as the user typed them, built together so that every reason is told at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvferry.errors import Reason, Refused
from kvferry.layout import CacheSpec, DType, Layout, mismatches


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


class _Attempt(NamedTuple):
    """How far building one side went, and why no further."""

    spec: CacheSpec | None
    layout: Layout | None
    reasons: tuple[Reason, ...]


def both_sides(
    read_spec: Callable[[SideFields], CacheSpec], prefill: SideFields, decode: SideFields
) -> Sides | tuple[Reason, ...]:
    """Two layouts, or everything that is wrong with either of them and with the pair."""
    ours, theirs = _attempt(read_spec, prefill), _attempt(read_spec, decode)
    if ours.layout is not None and theirs.layout is not None:
        return Sides(ours.layout, theirs.layout)
    reasons = _told_once(ours.reasons, theirs.reasons)
    if ours.spec is not None and theirs.spec is not None:
        reasons += mismatches(ours.spec, theirs.spec)
    return reasons


def _attempt(read_spec: Callable[[SideFields], CacheSpec], side: SideFields) -> _Attempt:
    spec = None
    try:
        spec = read_spec(side)
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
