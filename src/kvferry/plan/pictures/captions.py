"""The words of a picture: titles, labels, tooltips and table cells."""

from __future__ import annotations

from kvferry.layout.intervals import Span
from kvferry.layout.layout import Shard
from kvferry.layout.spec import Group
from kvferry.layout.tokens import ALL_TOKENS
from kvferry.plan.describe import layers_text, rank_name, span_text, tokens_text
from kvferry.plan.pictures.scene import MAX_CARDS, Card, CarriedMove, PictureSide, Scene
from kvferry.plan.plan import Plan
from kvferry.plan.units import human_bytes

TABLE_COLUMNS = ("group", "source", "target", "layers", "units", "tokens", "bytes", "share")


def title(plan: Plan) -> str:
    """Return the shardings of both sides: ``TP4 → TP1 × 4 replicas``."""
    return " → ".join(
        f"{layout.sharding}" + (f" × {layout.dp} replicas" if layout.dp > 1 else "")
        for layout in (plan.source, plan.target)
    )


def subtitle(scene: Scene) -> str:
    """Return the request and the plan in one line."""
    plan, request = scene.plan, scene.request
    parts = [plural(plan.spec.num_layers, "layer"), plural(request.num_tokens, "token")]
    if request.prefix:
        parts.append(f"{request.prefix:,} of them cached")
    parts.append(f"{human_bytes(scene.sizes.total())} in {plural(len(scene.carried), 'move')}")
    parts.append(f"plan {plan.digest[:12]}")
    return "  ·  ".join(parts)


def heading(plan: Plan, side: PictureSide) -> str:
    """Return the heading of a column of ranks."""
    layout = side.layout_of(plan)
    parts = [f"1 of {layout.dp} replicas"] if layout.dp > 1 else []
    parts += [plural(layout.num_ranks, "rank"), layout.pages_text, layout.order.upper()]
    return f"{side.engine.capitalize()}: {', '.join(parts)}"


def shard_lines(group: Group, shards: tuple[Shard, ...]) -> list[str]:
    """Return the lines beside a map: tokens, units and layers, as far as they are divided."""
    tokens = shards[0].tokens
    # ``1::8``, or ``64 of 512``.
    part = tokens if tokens.pattern.density == 1 else tokens.pattern
    lines = [] if tokens == ALL_TOKENS else [f"tokens {part!r}"]
    if group.units > 1:
        lines.append(units_text(group, shards[0].units))
    lines += [f"layers {layers_text(group, shard.layers)}" for shard in shards]
    return [shorten(line, 18) for line in lines]


def move_texts(scene: Scene, carried: CarriedMove) -> tuple[str, ...]:
    """Return one move as table cells, in the order of ``TABLE_COLUMNS``."""
    _, move, num_bytes = carried
    group = scene.plan.spec.group(move.group)
    tokens = scene.plan.tokens_of(move, scene.request)
    percent = 100 * num_bytes / scene.sizes.total()
    return (
        move.group,
        f"prefill {move.source}",
        f"decode {move.target}",
        layers_text(group, move.layers),
        units_text(group, move.units),
        f"{tokens.num_tokens:,} ({tokens_text(tokens)})",
        human_bytes(num_bytes),
        f"{percent:.1f} %" if percent >= 0.05 else "<0.1 %",
    )


def move_tip(texts: tuple[str, ...]) -> str:
    """Return the tooltip of a band, from the texts of its move."""
    group, source, target, layers, units, tokens, size, share = texts
    return (
        f"{source} → {target}\ngroup {group}\nlayers {layers}\n{units}\n"
        f"tokens {tokens}\n{size}, {share} of the total"
    )


def card_tip(plan: Plan, card: Card) -> str:
    """Return the tooltip of a card."""
    rank = rank_name(card.side.layout_of(plan), card.rank)
    verb = "sends" if card.side is PictureSide.SOURCE else "receives"
    size = human_bytes(sum(one.num_bytes for one in card.moves))
    return f"{card.side.engine} {rank}\n{verb} {size} in {plural(len(card.moves), 'move')}"


def notes(scene: Scene) -> list[str]:
    """Return what the picture leaves out."""
    plan, request = scene.plan, scene.request
    if not scene.carried:
        cached, tokens = f"{request.prefix:,}", plural(request.num_tokens, "token")
        return [f"Nothing to move: decode has {cached} of {tokens} cached."]
    lines = [
        f"Shown: the first {MAX_CARDS} of {num_ranks:,} {side.engine} ranks."
        for side in PictureSide
        if (num_ranks := side.layout_of(plan).num_ranks) > MAX_CARDS
    ]
    if len(scene.bands) < len(plan.moves):
        drawn, moves = f"{len(scene.bands):,}", plural(len(plan.moves), "move")
        why = "Others carry nothing for this request, are smaller, or have a rank not shown."
        lines.append(f"Drawn: {drawn} of {moves}. {why}")
    return lines


def units_text(group: Group, units: Span) -> str:
    """Return a span of units: ``heads 0-1``."""
    return f"{unit_word(group)}{'' if len(units) == 1 else 's'} {span_text(units)}"


def unit_word(group: Group) -> str:
    """Return what to call a unit of a group."""
    return "head" if {tensor.name for tensor in group.tensors} == {"k", "v"} else "unit"


def plural(count: int, word: str) -> str:
    """Return a count with its noun: ``1 move``, ``2,000 moves``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def shorten(text: str, limit: int = 24) -> str:
    """Return ``text``, cut with an ellipsis if it is longer than ``limit``."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
