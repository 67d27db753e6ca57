"""Choice of the transport of a link.

Each side lists the transports it has, best first, and those it lacks with the reason. Problems
that only show when connecting, such as memory of another user, are left to the endpoint: it
tries the common transports in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvferry.protocol.messages import TransportOffer, TransportOffers


class CommonTransports(NamedTuple):
    """The target's offers that both sides can use, best first, and why others can't be used."""

    offers: tuple[TransportOffer, ...]
    problems: tuple[str, ...]


def common_transports(source: TransportOffers, target: TransportOffers) -> CommonTransports:
    """Return the transports that both sides can use, in the source's order, since it writes."""
    at_source = {offer.name: offer for offer in source.held}
    at_target = {offer.name: offer for offer in target.held}
    lacks = [lack.name for side in (source, target) for lack in side.lacked]
    offers: list[TransportOffer] = []
    problems: list[str] = []
    for name in dict.fromkeys([*at_source, *at_target, *lacks]):
        ours, theirs = at_source.get(name), at_target.get(name)
        if ours is None and theirs is None:
            problem = f"on neither side ({_why(source, name) or _why(target, name)})"
        elif theirs is None:
            problem = f"not at decode ({_why(target, name) or 'it was not asked for'})"
        elif ours is None:
            problem = f"not at prefill ({_why(source, name) or 'it was not asked for'})"
        elif ours.realm != theirs.realm:
            problem = f"prefill is at {ours.realm} and decode at {theirs.realm}, which do not meet"
        else:
            offers.append(theirs)
            continue
        problems.append(f"{name}: {problem}")
    return CommonTransports(tuple(offers), tuple(problems))


def no_transport_message(problems: Iterable[str]) -> str:
    """Return the refusal text for two sides that have no transport in common."""
    return "prefill can't write into decode's memory by any transport: " + (
        "; ".join(problems) or "neither side has one"
    )


def _why(side: TransportOffers, name: str) -> str | None:
    return next((lack.why for lack in reversed(side.lacked) if lack.name == name), None)
