"""The picture in words: titles, labels, tooltips, table rows. No coordinates."""

from __future__ import annotations

from kvferry.layout.intervals import ALL_TOKENS, Span, Tokens
from kvferry.layout.layout import Layout, Parallel, Shard
from kvferry.layout.spec import Group, Paged, StateRow, Window
from kvferry.plan.pictures.parts import PictureSide, ordinals
from kvferry.plan.plan import Move, Plan, Request
from kvferry.plan.units import human_bytes

COLUMNS = ("group", "source", "target", "layers", "units", "tokens", "bytes", "share")


def title(plan: Plan) -> str:
    """``TP4 → TP1 × 4 replicas``."""
    return " → ".join(_sharding(layout) for layout in (plan.source, plan.target))


def _sharding(layout: Layout) -> str:
    return f"{layout.sharding} × {layout.dp} replicas" if layout.dp > 1 else f"{layout.sharding}"


def subtitle(plan: Plan, request: Request, num_bytes: int, num_moves: int) -> str:
    """The request and the plan in one line."""
    parts = [plural(plan.spec.num_layers, "layer")]
    if len(plan.spec.groups) == 1:
        parts.append(_only_group(plan.spec.groups[0]))
    parts.append(plural(request.num_tokens, "token"))
    if request.prefix:
        parts.append(f"{request.prefix:,} of them cached")
    parts.append(f"{human_bytes(num_bytes)} in {plural(num_moves, 'move')}")
    parts.append(f"plan {plan.digest[:12]}")
    return "  ·  ".join(parts)


def _only_group(group: Group) -> str:
    units = plural(group.units, unit_word(group))
    return units if unit_word(group) == "head" else f"{shorten(group.name, 24)} of {units}"


def heading(side: PictureSide, layout: Layout) -> str:
    """What stands above a column."""
    parts = [f"1 of {layout.dp} replicas"] if layout.dp > 1 else []
    parts += [plural(layout.num_ranks, "rank"), f"page {layout.page_tokens}", layout.order.upper()]
    return f"{side.engine.capitalize()}: {', '.join(parts)}"


def plural(count: int, word: str) -> str:
    """``1 move``, ``2,000 moves``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def unit_word(group: Group) -> str:
    """What a unit of this group is to a person."""
    return "head" if {tensor.name for tensor in group.tensors} == {"k", "v"} else "unit"


def numbers(first: int, last: int) -> str:
    """``4``, or ``4–7``."""
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def span_text(span: Span) -> str:
    """A span as first and last, which is how people count heads."""
    return numbers(span.first, span.end - 1)


def units_text(group: Group, units: Span) -> str:
    """``heads 0–1``."""
    word = unit_word(group)
    return f"{word} {units.first}" if len(units) == 1 else f"{word}s {span_text(units)}"


def layers_text(group: Group, span: Span) -> str:
    """The group's layers in ``span``; how many, where the group skips some."""
    layers = _layers_in(group, span)
    text = numbers(layers[0], layers[-1])
    return text if len(layers) == layers[-1] - layers[0] + 1 else f"{text} ({len(layers)} layers)"


def _layers_in(group: Group, span: Span) -> tuple[int, ...]:
    # A search, not a scan: a long table of a deep model asks for this often.
    first, end = ordinals(group, span)
    return group.layers[first:end]


def pattern_text(tokens: Tokens) -> str:
    """Which tokens, before any request: ``tokens 1::2`` as Python would slice them."""
    if tokens.step > 1:
        return f"tokens {tokens.first}:{'' if tokens.end is None else tokens.end}:{tokens.step}"
    if tokens.end is None:
        return f"tokens from {tokens.first:,}"
    return f"tokens {numbers(tokens.first, max(tokens.first, tokens.end - 1))}"


def carried_text(tokens: Tokens) -> str:
    """The tokens of a request that a move carries: how many and which."""
    assert tokens.end is not None
    which = numbers(tokens.first, tokens.end - 1)
    every = f", every {ordinal(tokens.step)}" if tokens.step > 1 and tokens.num_tokens > 1 else ""
    return f"{tokens.num_tokens:,} ({which}{every})"


def ordinal(number: int) -> str:
    """``2nd``, ``11th``."""
    ending = "th" if number % 100 in (11, 12, 13) else _ENDINGS.get(number % 10, "th")
    return f"{number}{ending}"


_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


def place_text(layout: Layout, rank: int) -> str:
    """A rank's coordinates: ``pp1 · tp1``; nothing where ownership is stated."""
    sharding = layout.sharding
    if not isinstance(sharding, Parallel):
        return ""
    stage, rest = divmod(rank, sharding.cp * sharding.tp)
    cp_rank, tp_rank = divmod(rest, sharding.tp)
    parts = [f"pp{stage}"] if sharding.pp > 1 else []
    parts += [f"cp{cp_rank}"] if sharding.cp > 1 else []
    return " · ".join([*parts, f"tp{tp_rank}"])


def holding_lines(group: Group, shards: list[Shard]) -> tuple[str, ...]:
    """What is written beside a map, what matters most first."""
    lines = []
    if shards[0].tokens != ALL_TOKENS:
        lines.append(pattern_text(shards[0].tokens))
    if group.units > 1:
        lines.append(units_text(group, shards[0].units))
    lines += [_held_layers(group, shard.layers) for shard in shards]
    return tuple(shorten(line, 18) for line in lines)


def _held_layers(group: Group, span: Span) -> str:
    layers = _layers_in(group, span)
    if len(layers) == 1:
        return f"layer {layers[0]}"
    skips = len(layers) < layers[-1] - layers[0] + 1
    count = f"{len(layers)} of " if skips else ""
    return f"{count}layers {numbers(layers[0], layers[-1])}"


def card_tip(side: PictureSide, layout: Layout, rank: int, moved: list[int]) -> str:
    """What hovering a card says; ``moved`` are the bytes of its bands."""
    place = place_text(layout, rank)
    verb = "sends" if side is PictureSide.SOURCE else "receives"
    head = f"{side.engine} {rank}" + (f" ({place})" if place else "")
    return f"{head}\n{verb} {human_bytes(sum(moved))} in {plural(len(moved), 'move')}"


def shorten(text: str, limit: int) -> str:
    """``text``, cut where it would not fit."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def move_texts(
    plan: Plan, move: Move, request: Request, num_bytes: int, total: int
) -> tuple[str, ...]:
    """One move in the order of ``COLUMNS``."""
    group = plan.spec.group(move.group)
    return (
        move.group,
        f"prefill {move.source}",
        f"decode {move.target}",
        layers_text(group, move.layers),
        units_text(group, move.units),
        carried_text(plan.tokens_of(move, request)),
        human_bytes(num_bytes),
        share_text(num_bytes, total),
    )


def share_text(num_bytes: int, total: int) -> str:
    """A part of the total in percent, never rounded down to nothing."""
    percent = 100 * num_bytes / total
    return f"{percent:.1f} %" if percent >= 0.05 else "<0.1 %"


def move_tip(texts: tuple[str, ...]) -> str:
    """What hovering a band says, a line for each fact."""
    group, source, target, layers, units, tokens, size, share = texts
    return (
        f"{source} → {target}\ngroup {group}\nlayers {layers}\n{units}\n"
        f"tokens {tokens}\n{size}, {share} of the total"
    )


def group_text(group: Group, num_bytes: int) -> str:
    """A group's line in the legend."""
    match group.kind:
        case Paged():
            kind = "paged"
        case Window(num_tokens=kept):
            kind = f"window of {kept:,} tokens"
        case StateRow():
            kind = "one row a request"
    shape = f"{plural(group.units, unit_word(group))} × {plural(len(group.layers), 'layer')}"
    return f"{shape}, {kind}, {human_bytes(num_bytes)}"


def nothing_text(plan: Plan, request: Request) -> str:
    """Why a picture has no bands."""
    if not plan.moves:
        return "This plan has no moves."
    if request.num_tokens and request.prefix >= request.num_tokens:
        return f"Nothing travels: all {request.num_tokens:,} tokens are cached on the decode side."
    return "Nothing travels for this request."
