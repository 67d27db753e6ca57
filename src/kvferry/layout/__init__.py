"""Layouts: what a cache consists of and how one side shards and pages it. Pure."""

from kvferry.layout.intervals import ALL_TOKENS, Span, Tokens
from kvferry.layout.layout import Holding, Layout, Order, Parallel, Stated
from kvferry.layout.match import mismatches
from kvferry.layout.spec import (
    CacheSpec,
    DType,
    Group,
    Paged,
    Slot,
    Tensor,
    Window,
    attention,
)

__all__ = [
    "ALL_TOKENS",
    "CacheSpec",
    "DType",
    "Group",
    "Holding",
    "Layout",
    "Order",
    "Paged",
    "Parallel",
    "Slot",
    "Span",
    "Stated",
    "Tensor",
    "Tokens",
    "Window",
    "attention",
    "mismatches",
]
