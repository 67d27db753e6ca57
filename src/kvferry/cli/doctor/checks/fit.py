"""The fit of two layouts and a transport, and how a request would travel.

Pure: everything here follows from what was typed. What is wrong with the words
themselves is an ``InputError``; what can't work is a finding.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.cli.doctor.checks.check import Asked, Check, State, ok
from kvferry.cli.parsing import whole
from kvferry.cli.sides import Sides, both_sides, read_side, read_spec
from kvferry.errors import InputError, Reason, Refused
from kvferry.memory.staging import slots_for
from kvferry.plan import Estimate, Plan, Request, TransferMode, check, estimate, reshard
from kvferry.plan.cost import DEFAULT_BUDGET_BYTES, default_link_cost, preset_for, slots_on
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.regions import HOST, Device

AREA = "layouts"


@dataclass(frozen=True)
class Pairing:
    """Two layouts that fit, and what a request between them costs."""

    plan: Plan
    request: Request
    costs: Estimate
    preset: str
    device: Device

    @property
    def num_peers(self) -> int:
        """The most peers that any rank of either side speaks to, over all replicas."""
        plan = self.plan
        of_targets = (len(plan.contacts(rank)) for rank in range(plan.target.num_ranks))
        of_sources = (len(plan.audience(rank)) for rank in range(plan.source.num_ranks))
        return max(max(of_targets) * plan.source.dp, max(of_sources) * plan.target.dp)

    @property
    def request_bytes(self) -> int:
        """What one request's cache takes at decode."""
        return self.costs.num_bytes


# ---------------------------------------------------------------- reading


def read_pairing(args: argparse.Namespace, asked: Asked) -> Pairing | tuple[Reason, ...] | None:
    """The layouts that were typed, or why they do not fit; None if there are none."""
    if args.prefill is None and args.decode is None:
        return None
    if args.prefill is None or args.decode is None:
        missing = "--prefill" if args.prefill is None else "--decode"
        raise InputError(f"{missing} is missing; give both sides, or neither")
    prefill = read_side(args.prefill, "--prefill")
    decode = read_side(args.decode, "--decode", extra={"prefix": whole("prefix", least=0)})
    request = Request(whole("--tokens", least=0)(args.tokens), decode.prefix)
    sides = both_sides(lambda side: read_spec(args, side.dtype), prefill, decode)
    if not isinstance(sides, Sides):
        return sides
    try:
        plan = reshard(*sides)
    except Refused as refused:
        return refused.reasons
    check(plan)
    device = HOST if asked.on_host else Device("cuda")
    costs = estimate(plan, request, default_link_cost(asked.best, device))
    return Pairing(plan, request, costs, preset_for(asked.best, device), device)


# ---------------------------------------------------------------- judging


def refused(reasons: tuple[Reason, ...]) -> Iterator[Check]:
    """Every reason, under its code."""
    for reason in reasons:
        what, _, remedy = reason.message.rpartition("; ")
        detail, remedy = (what, remedy) if what else (remedy, "change one side's layout")
        yield Check(AREA, reason.code, State.PROBLEM, detail, remedy)


def fitting(pairing: Pairing) -> Iterator[Check]:
    """The plan, its path, and whether staging is of use."""
    plan, costs = pairing.plan, pairing.costs
    yield ok(
        AREA,
        "plan",
        f"{plan.source} → {plan.target}: {len(plan.moves)} moves, proven; "
        f"{human_bytes(costs.num_bytes)} for {pairing.request.num_tokens} tokens",
    )
    if costs.moves:
        yield _path(pairing)
        yield staging(pairing)


def _path(pairing: Pairing) -> Check:
    costs = pairing.costs
    others = ", ".join(
        f"{path} {human_seconds(costs.predicted_s(path))}"
        for path in TransferMode
        if path is not costs.chosen and costs.is_open(path)
    )
    told = (
        f"{costs.chosen}: about {human_seconds(costs.predicted_s())} in "
        f"{costs.pieces(costs.chosen):,} pieces, by the figures of {pairing.preset}"
    )
    return ok(AREA, "path", f"{told} ({others})" if others else told)


def staging(pairing: Pairing, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> Check:
    """Whether slots out of such a budget would be used, and whether they are large enough."""
    costs, shown, rule = pairing.costs, human_bytes(budget_bytes), slots_on(pairing.device)
    if costs.link_cost.maps_peer:
        return ok(AREA, "staging", "none: this transport copies straight into place")
    carried = costs.carried(TransferMode.STAGED)
    if not carried:
        told = f"of no use here; staging_bytes=0 saves {shown} for each endpoint"
        return ok(AREA, "staging", told)
    try:
        slots = slots_for(_largest_bytes(pairing), budget_bytes=budget_bytes, rule=rule)
    except InputError as error:
        what, _, remedy = str(error).rpartition("; ")
        return Check(AREA, "staging", State.NOTE, f"{what}, so slices are written", remedy)
    if slots.num_slots < rule.enough:
        told = f"{shown} are only {slots.num_slots} slots, so copies and writes can't overlap"
        remedy = f"set staging_bytes to {rule.enough * slots.slot_bytes} or more"
        return Check(AREA, "staging", State.NOTE, told, remedy)
    gain = costs.predicted_s(TransferMode.SLICES) / costs.predicted_s()
    return ok(
        AREA,
        "staging",
        f"{shown} for each endpoint are {slots.num_slots} slots of {human_bytes(slots.slot_bytes)}"
        f"; they carry {human_bytes(carried)}, {gain:.1f} times as fast as slices",
    )


def _largest_bytes(pairing: Pairing) -> int:
    """One token, or one state row, of one layer: a parcel is cut no smaller."""
    spec = pairing.plan.spec
    return max(
        len(one.move.units) * spec.group(one.move.group).unit_bytes
        for one in pairing.costs.moves
        if one.choice.mode is TransferMode.STAGED
    )
