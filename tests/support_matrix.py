"""The generator of docs/support.md: ``python tests/support_matrix.py`` writes the page.

Cells start from the planner: "planned" where it proves a plan for that model family and pair of
layouts, "refused" with its reason where it does not. ``docs/support.toml`` adds what a connector
refuses and what was shown on bytes or on real engines, each with the test that shows it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
from configs import CONFIGS

from kvferry.errors import KvferryError
from kvferry.layout import CacheSpec, Layout, Order, Parallel, attention
from kvferry.layout.hf import spec_from_config
from kvferry.plan import check, reshard

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "docs" / "support.toml"
PAGE = ROOT / "docs" / "support.md"


class Cell(StrEnum):
    """The kinds of evidence for a combination, weakest first."""

    PLANNED = "planned"
    REFUSED = "refused"
    BYTES = "bytes"
    REAL = "real engine"


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test's evidence for some families and layouts; without a test, the reason of a refusal.

    No families means all of the section.
    """

    cell: Cell
    layouts: tuple[str, ...]
    families: tuple[str, ...] = ()
    test: str = ""
    reason: str = ""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine in one version on one kind of device."""

    engine: str
    version: str
    device: str
    about: str
    claims: tuple[Claim, ...] = ()
    families: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """docs/support.toml."""

    sections: tuple[Section, ...]


FAMILIES: Mapping[str, Callable[[], CacheSpec]] = {
    "attention": lambda: spec_from_config(CONFIGS["llama-3.1-8b"]),
    "K and V of different widths": lambda: attention(
        layers=4, kv_heads=8, head_dim=192, v_head_dim=128
    ),
    "MLA": lambda: spec_from_config(CONFIGS["deepseek-v3"]),
    "MLA and index keys": lambda: spec_from_config(CONFIGS["deepseek-v3.2"]),
    "sliding windows": lambda: spec_from_config(CONFIGS["gemma-3-27b"]),
    "Mamba-2 hybrid": lambda: spec_from_config(CONFIGS["granite-4.0-h-small"]),
    "Mamba-1 hybrid": lambda: spec_from_config(CONFIGS["jamba-mini"]),
    "compressed attention": lambda: spec_from_config(CONFIGS["deepseek-v4-flash"]),
    "gated delta hybrid": lambda: spec_from_config(CONFIGS["qwen3-next-80b-a3b"]),
}


class Pair(NamedTuple):
    """How two layouts differ, as one column."""

    source: Callable[[CacheSpec], Layout]
    target: Callable[[CacheSpec], Layout]


WHOLE = Parallel()


def layout(
    sharding: Parallel = WHOLE, dp: int = 1, page: int = 16, order: Order = Order.NHD
) -> Callable[[CacheSpec], Layout]:
    return lambda spec: Layout(
        spec,
        sharding,
        dp=dp,
        page_tokens=page,
        order=order,
        # Pages hold whole entries.
        group_pages=tuple(
            (group.name, math.lcm(page, group.tokens_per_entry))
            for group in spec.groups
            if page % group.tokens_per_entry
        ),
    )


def heads(spec: CacheSpec) -> int:
    return max(group.units for group in spec.groups)


LAYOUTS: Mapping[str, Pair] = {
    "equal TP": Pair(layout(Parallel(tp=2)), layout(Parallel(tp=2))),
    "different TP": Pair(layout(Parallel(tp=2)), layout(Parallel(tp=1))),
    "replicated heads": Pair(
        lambda spec: layout(Parallel(tp=2 * heads(spec)))(spec),
        layout(Parallel(tp=2)),
    ),
    "page sizes": Pair(layout(page=16), layout(page=64)),
    "NHD to HND": Pair(layout(order=Order.NHD), layout(order=Order.HND)),
    "PP": Pair(layout(Parallel(pp=2)), layout(Parallel(tp=2))),
    "DP replicas": Pair(layout(Parallel(tp=2)), layout(dp=2)),
    "CP by tokens": Pair(layout(Parallel(cp=2)), layout(Parallel(cp=1))),
    "CP by blocks": Pair(
        layout(Parallel(cp=8, interleave=64)), layout(Parallel(cp=2, interleave=16))
    ),
}
COLUMNS = tuple(LAYOUTS)


def planned(spec: CacheSpec, pair: Pair) -> str:
    """Return "planned" if the planner proves a plan, else "refused" with its reason."""
    try:
        check(reshard(pair.source(spec), pair.target(spec)))
    except KvferryError as error:
        return f"{Cell.REFUSED}: {str(error).partition(';')[0]}"
    return str(Cell.PLANNED)


def cell(section: Section, family: str, column: str, tests: Sequence[str]) -> str:
    """Return one cell: the strongest claim for it, or what the planner says."""
    claims = [
        claim
        for claim in section.claims
        if family in (claim.families or FAMILIES) and column in claim.layouts
    ]
    if not claims:
        return planned(FAMILIES[family](), LAYOUTS[column])
    best = max(claims, key=lambda claim: list(Cell).index(claim.cell))
    shown = f"[{best.cell}][{tests.index(best.test) + 1}]" if best.test else str(best.cell)
    return f"{shown}: {best.reason}" if best.reason else shown


def named_tests(facts: Facts) -> list[str]:
    """Return the tests that claims name, in order of first mention."""
    named = (claim.test for section in facts.sections for claim in section.claims)
    return list(dict.fromkeys(filter(None, named)))


def lines(facts: Facts) -> Iterator[str]:
    tests = named_tests(facts)
    for section in facts.sections:
        yield f"## {section.engine} {section.version}, {section.device}"
        yield ""
        yield section.about
        yield ""
        yield f"| model family | {' | '.join(COLUMNS)} |"
        yield f"|---|{'---|' * len(COLUMNS)}"
        for family in section.families or FAMILIES:
            cells = (cell(section, family, column, tests) for column in COLUMNS)
            yield f"| {family} | {' | '.join(cells)} |"
        yield ""
    for number, test in enumerate(tests, 1):
        path, _, name = test.partition("::")
        yield f'[{number}]: ../{path} "{name}"'


def read_facts() -> Facts:
    return msgspec.convert(tomllib.loads(FACTS.read_text(encoding="utf-8")), Facts)


HEAD = """\
# Support

What runs where: engine × version × device, model family and pair of layouts. This page is generated
by `python tests/support_matrix.py` from `docs/support.toml` and the planner; a test keeps it fresh.

| cell | meaning |
|---|---|
| real engine | answers of real engines were compared token by token with those of one engine |
| bytes | every byte was compared, in an engine's pools or between endpoints; no model computed |
| planned | the planner proves a plan that covers every unit exactly once; nothing was moved |
| refused | kvferry refuses it or the engine cannot have it; with the reason or a test |

Links lead to the test, which the link's title names. The columns name how prefill and decode
differ: TP2 to TP2, TP2 to TP1, twice as many ranks as KV heads to TP2, pages of 16 to 64 tokens,
NHD to HND, PP2 to TP2, TP2 to TP1 × 2 replicas, context parallelism that interleaves single tokens
(2 to 1), and by blocks of tokens (8 ranks that take turns at 64 to 2 that take turns at 16).

"""


def page(facts: Facts) -> str:
    return HEAD + "\n".join(lines(facts)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(read_facts()), encoding="utf-8")
