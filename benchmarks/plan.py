"""Time of planning and binding, with verified results.

    .venv/bin/python benchmarks/plan.py

Planning: large pipelines of large tensor-parallel groups, verified by ``check``. Binding: a long
request, compared with the time to list each of its pieces in the same run; the byte counts must
agree. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.layout import CacheSpec, ExplicitSharding, Layout, Parallel, Shard, Span, attention
from kvferry.plan import (
    PagedView,
    PageTable,
    Plan,
    RankPair,
    Request,
    bind,
    check,
    contiguous_pools,
    reshard,
)

REPEATS = 7


def median_s(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def uneven(spec: CacheSpec, tp: int, pp: int) -> ExplicitSharding:
    """Return a sharding with heads as even as possible, for a tp that does not divide them."""
    heads = spec.groups[0].units
    return ExplicitSharding(
        tuple(
            (Shard("kv", stage, Span(heads * rank // tp, heads * (rank + 1) // tp)),)
            for stage in Parallel(pp=pp).stage_spans(spec.num_layers)
            for rank in range(tp)
        )
    )


def plan_case(name: str, source: Layout, target: Layout) -> dict[str, Any]:
    plan: Plan = reshard(source, target)
    check(plan)
    seconds = median_s(lambda: reshard(source, target))
    row = {"case": name, "plan_ms": round(seconds * 1e3, 2), "moves": len(plan.moves)}
    print(f"{name:52} {row['plan_ms']:8.2f} ms  {len(plan.moves):6} moves, verified")
    return row


def fragmented(layout: Layout, rank: int, num_tokens: int, seed: int) -> PagedView:
    num_pages = 2 * (num_tokens // layout.page_tokens)
    pools = contiguous_pools(layout, rank, num_pages)
    pages = np.random.default_rng(seed).permutation(num_pages)[: num_pages // 2]
    return PagedView(pools.map, {"kv": PageTable(pages)})


def _copy(side: PagedView) -> PagedView:
    return PagedView(
        side.pools, {name: PageTable(table.pages) for name, table in side.tables.items()}
    )


def bind_case(name: str, source: Layout, target: Layout, num_tokens: int) -> dict[str, Any]:
    """Bind one source's share of a request, then list each of its pieces."""
    plan, request, pair = reshard(source, target), Request(num_tokens), RankPair(0, 0)
    sides = fragmented(source, 0, num_tokens, 1), fragmented(target, 0, num_tokens, 2)
    binding = bind(plan, pair, request, *sides)
    pieces = binding.descriptors()
    expected = sum(plan.bytes_of(move, request) for move in plan.between(*pair))
    if not expected == binding.num_bytes == int(pieces.length.sum()):
        raise SystemExit(f"{name}: the binding does not carry the plan's bytes")
    # The pieces of a page table are cached; a new request has new tables.
    requests = iter([(_copy(sides[0]), _copy(sides[1])) for _ in range(REPEATS)])
    bind_s = median_s(lambda: bind(plan, pair, request, *next(requests)))
    list_s = median_s(binding.descriptors, repeats=3)
    row = {
        "case": name,
        "bind_ms": round(bind_s * 1e3, 2),
        "descriptors_ms": round(list_s * 1e3, 1),
        "pieces": binding.num_pieces,
        "times_below": round((bind_s + list_s) / bind_s, 1),
    }
    print(
        f"{name:52} {row['bind_ms']:8.2f} ms  {binding.num_pieces:10,} pieces, "
        f"listed in {row['descriptors_ms']:,.0f} ms: {row['times_below']} times as much"
    )
    return row


def main() -> None:
    wide = attention(layers=128, kv_heads=96, head_dim=128)
    wider = attention(layers=128, kv_heads=192, head_dim=128)
    long = attention(layers=80, kv_heads=8, head_dim=128)
    plans = [
        plan_case(
            "TP64·PP8 (stated) → TP48·PP4, 96 heads, 128 layers",
            Layout(wide, uneven(wide, 64, 8)),
            Layout(wide, Parallel(tp=48, pp=4)),
        ),
        plan_case(
            "TP64·PP8 → TP48·PP4, 192 heads, 128 layers",
            Layout(wider, Parallel(tp=64, pp=8)),
            Layout(wider, Parallel(tp=48, pp=4)),
        ),
        plan_case("TP4 → TP1, 8 heads, 80 layers", Layout(long, Parallel(tp=4)), Layout(long)),
        plan_case("CP8 by 64 → CP3 by 1, 8 heads, 80 layers",
                  Layout(long, Parallel(cp=8, interleave=64)), Layout(long, Parallel(cp=3))),
    ]  # fmt: skip
    bindings = [
        bind_case("131,072 tokens, 80 layers, page 16, TP4 → TP1",
                  Layout(long, Parallel(tp=4)), Layout(long), 131072),
        bind_case("131,072 tokens, 80 layers, page 16, TP1 → TP1",
                  Layout(long), Layout(long), 131072),
        *(
            bind_case(f"131,072 tokens, 80 layers, page 16, CP8 by {interleave} → TP2",
                      Layout(long, Parallel(cp=8, interleave=interleave)),
                      Layout(long, Parallel(tp=2)), 131072)
            for interleave in (1, 16, 64)
        ),
        bind_case("131,072 tokens, 80 layers, page 16, CP8 by 64 → CP3 by 1",
                  Layout(long, Parallel(cp=8, interleave=64)),
                  Layout(long, Parallel(cp=3)), 131072),
    ]  # fmt: skip
    times = {row["case"].rpartition(", ")[2]: row["bind_ms"] for row in bindings}
    ratio = round(times["CP8 by 64 → TP2"] / times["TP4 → TP1"], 2)
    print(f"context parallelism by 64 binds in {ratio} times the time without it (limit 3)")
    print(json.dumps({"plans": plans, "bindings": bindings, "cp_ratio": ratio}))


if __name__ == "__main__":
    main()
