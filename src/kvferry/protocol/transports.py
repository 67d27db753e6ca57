"""The transport of a link: the best that both sides can use, or why there is none.

Pure. Each side tells what it holds, best first, and what it had to do without. What only the
attempt can tell, such as memory of another user, is found out by whoever connects: it tries
what is common in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvferry.protocol.messages import TransportOffer, TransportOffers


class CommonTransports(NamedTuple):
    """What two sides can both use, as the target offers it, best first; and why not the rest."""

    offers: tuple[TransportOffer, ...]
    problems: tuple[str, ...]


def common_transports(source: TransportOffers, target: TransportOffers) -> CommonTransports:
    """What both can use. The source's order counts, because it is the source that writes."""
    ours = {offer.name: offer for offer in source.held}
    theirs = {offer.name: offer for offer in target.held}
    offers = [theirs[name] for name in ours if _meet(ours.get(name), theirs.get(name))]
    chosen = {offer.name for offer in offers}
    why = (_whys(source), _whys(target))
    problems = [
        f"{name}: {_problem(ours.get(name), theirs.get(name), why[0].get(name), why[1].get(name))}"
        for name in _names(source, target)
        if name not in chosen
    ]
    return CommonTransports(tuple(offers), tuple(problems))


def none_common(problems: Iterable[str]) -> str:
    """Why two sides can't reach each other, in one sentence."""
    return "prefill can't write into decode's memory by any transport: " + (
        "; ".join(problems) or "neither side has one"
    )


def _meet(ours: TransportOffer | None, theirs: TransportOffer | None) -> bool:
    return ours is not None and theirs is not None and ours.realm == theirs.realm


def _names(*sides: TransportOffers) -> list[str]:
    """All that either side has heard of, in order."""
    held = [offer.name for side in sides for offer in side.held]
    lacked = [lack.name for side in sides for lack in side.lacked]
    return list(dict.fromkeys([*held, *lacked]))


def _whys(side: TransportOffers) -> dict[str, str]:
    return {lack.name: lack.why for lack in side.lacked}


def _problem(
    ours: TransportOffer | None,
    theirs: TransportOffer | None,
    our_why: str | None,
    their_why: str | None,
) -> str:
    if ours is not None and theirs is not None:
        return f"prefill is at {ours.realm} and decode at {theirs.realm}, which do not meet"
    unnamed = "it was not asked for"
    if ours is not None:
        return f"not at decode ({their_why or unnamed})"
    if theirs is not None:
        return f"not at prefill ({our_why or unnamed})"
    return f"on neither side ({our_why or their_why})"
