"""Both sides as the user typed them, built together so that every reason is told at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvferry.errors import Reason, Refused
from kvferry.layout import CacheSpec, DType, Layout, mismatches


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
