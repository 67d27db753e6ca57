"""Layouts: what a cache consists of, and how one side shards and pages it. Pure."""

from kvferry.layout.intervals import Span
from kvferry.layout.layout import ExplicitSharding, Layout, Order, Parallel, Shard
from kvferry.layout.match import mismatches
from kvferry.layout.spec import (
    CacheSpec,
    DType,
    Group,
    Paged,
    Part,
    StateRow,
    Tensor,
    Window,
    attention,
)
from kvferry.layout.tokens import ALL_TOKENS, EVERY, Pattern, Tokens

__all__ = [
    "ALL_TOKENS",
    "EVERY",
    "CacheSpec",
    "DType",
    "ExplicitSharding",
    "Group",
    "Layout",
    "Order",
    "Paged",
    "Parallel",
    "Part",
    "Pattern",
    "Shard",
    "Span",
    "StateRow",
    "Tensor",
    "Tokens",
    "Window",
    "attention",
    "mismatches",
]
