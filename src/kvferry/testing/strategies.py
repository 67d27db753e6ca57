"""Hypothesis strategies for caches and layouts, small enough to check by brute force.

For authors of engines and transports: every pair drawn by ``pairs`` must have a plan that passes
``check`` and moves every byte.
"""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from kvferry.layout import (
    ALL_TOKENS,
    CacheSpec,
    DType,
    ExplicitSharding,
    Group,
    Layout,
    Order,
    Paged,
    Parallel,
    Shard,
    Span,
    StateRow,
    Tensor,
    Tokens,
    Window,
)
from kvferry.layout.spec import Kind

MAX_TOKENS = 40


@st.composite
def groups(draw: st.DrawFn, name: str, num_layers: int) -> Group:
    """A group of any kind in some of the model's layers."""
    kinds: list[Kind] = [Paged(), Window(7), Window(100), StateRow()]
    kind = draw(st.sampled_from(kinds))
    layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    num_tensors = draw(st.integers(1, 2))
    tensors = tuple(
        Tensor(f"t{i}", draw(st.sampled_from([DType.UINT8, DType.BFLOAT16])), elements)
        for i, elements in enumerate(
            draw(st.lists(st.integers(1, 3), min_size=num_tensors, max_size=num_tensors))
        )
    )
    units = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    ratio = 1 if isinstance(kind, StateRow) else draw(st.sampled_from([1, 1, 1, 2, 4]))
    return Group(name, kind, tuple(sorted(layers)), units, tensors, ratio)


@st.composite
def specs(draw: st.DrawFn) -> CacheSpec:
    """A model of a few layers with one to three groups."""
    num_layers = draw(st.integers(1, 6))
    names = draw(st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")]))
    return CacheSpec(num_layers, tuple(draw(groups(name, num_layers)) for name in names))


def _common_ratio(spec: CacheSpec) -> int:
    return math.lcm(*(group.tokens_per_entry for group in spec.groups))


def _fits(group: Group, tp: int, dcp: int) -> bool:
    parts = tp if isinstance(group.kind, StateRow) else tp // dcp
    return group.units % parts == 0 or parts % group.units == 0


@st.composite
def parallel(draw: st.DrawFn, spec: CacheSpec) -> Parallel:
    """A regular sharding that fits the model."""
    fits = [
        (tp, dcp)
        for tp in range(1, 13)
        for dcp in (1, 2, 3, 4)
        if tp % dcp == 0 and all(_fits(g, tp, dcp) for g in spec.groups)
    ]
    pp = draw(st.integers(1, min(3, spec.num_layers)))
    cuts = draw(st.permutations(range(1, spec.num_layers)))
    edges = [0, *sorted(cuts[: pp - 1]), spec.num_layers]
    stages = tuple(b - a for a, b in itertools.pairwise(edges))
    tp, dcp = draw(st.sampled_from(fits))
    return Parallel(
        tp=tp,
        pp=pp,
        cp=draw(st.integers(1, 3)),
        stages=draw(st.sampled_from([(), stages])),
        dcp=dcp,
        interleave=draw(st.integers(1, 5)) * _common_ratio(spec),
        copies=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def blocks(draw: st.DrawFn, group: Group, num_layers: int) -> list[list[Shard]]:
    """Blocks that together hold a whole group, each a list of shards."""
    part_of = draw(st.lists(st.integers(0, 1), min_size=num_layers, max_size=num_layers))
    parts = [[n for n in range(num_layers) if part_of[n] == part] for part in (0, 1)]
    edges = [0, *sorted(draw(st.sets(st.integers(1, group.units), max_size=2))), group.units]
    spans = [Span(a, b) for a, b in itertools.pairwise(edges) if b > a]
    return [
        [Shard(group.name, Span(n, n + 1), units, tokens) for n in layers]
        for layers in parts
        if layers
        for units in spans
        for tokens in draw(token_shares(group))
    ]


def token_shares(group: Group) -> st.SearchStrategy[list[Tokens]]:
    """Token sets that partition all positions."""
    if isinstance(group.kind, StateRow):
        return st.just([ALL_TOKENS])
    return st.one_of(
        st.just([ALL_TOKENS]),
        st.tuples(st.integers(2, 3), st.integers(1, 5)).map(
            lambda two: [Tokens.interleaved(i, two[0], two[1]) for i in range(two[0])]
        ),
        st.integers(1, MAX_TOKENS).map(lambda cut: [Tokens(0, cut), Tokens(cut, None)]),
    )


@st.composite
def explicit_shardings(draw: st.DrawFn, spec: CacheSpec) -> ExplicitSharding:
    """An explicit sharding: complete, uneven, with copies of some shards."""
    held = {group.name: draw(blocks(group, spec.num_layers)) for group in spec.groups}
    num_ranks = max(map(len, held.values())) + draw(st.integers(0, 2))
    ranks: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for choices in held.values():
        spare = num_ranks - len(choices)
        extra = draw(st.lists(st.sampled_from([*choices, []]), min_size=spare, max_size=spare))
        for rank, shards in zip(
            draw(st.permutations(range(num_ranks))), [*choices, *extra], strict=True
        ):
            ranks[rank] += shards
    return ExplicitSharding(tuple(map(tuple, ranks)))


@st.composite
def layouts(draw: st.DrawFn, spec: CacheSpec) -> Layout:
    """Any layout of that model."""
    sharding = draw(st.one_of(parallel(spec), explicit_shardings(spec)))
    sizes = st.sampled_from([1, 2, 3, 4, 8, 16])
    page_tokens = draw(sizes) * _common_ratio(spec)
    group_pages = tuple(
        (group.name, draw(sizes) * group.tokens_per_entry)
        for group in spec.groups
        if not isinstance(group.kind, StateRow) and draw(st.booleans())
    )
    packed = tuple(group.name for group in spec.groups if draw(st.booleans()))
    transposed = tuple(
        f"{group.name}.{tensor.name}"
        for group in spec.groups
        for tensor in group.tensors
        if group.name not in packed and not isinstance(group.kind, StateRow) and draw(st.booleans())
    )
    return Layout(
        spec,
        sharding,
        page_tokens=page_tokens,
        order=draw(st.sampled_from(Order)),
        packed=packed,
        transposed=transposed,
        group_pages=group_pages,
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of one model, the source's and the target's."""
    spec = draw(specs())
    return draw(layouts(spec)), draw(layouts(spec))
