"""Jobs: the simulated requests, and how prefill pushes each of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.ids import Room
from kvferry.layout.intervals import Span
from kvferry.plan.plan import Request
from kvferry.prefix import PrefixChain

PREFILL = "prefill"


@dataclass(frozen=True)
class SimPush:
    """One push of prefill: tokens, of all layers or of some, with or without state rows."""

    tokens: Span
    layers: Span | None = None
    states: bool = False


@dataclass(frozen=True)
class SimHolding:
    """A holder's answer to a pull: first tokens of a sequence, which may be another job's."""

    number: int
    tokens: int


@dataclass(frozen=True)
class SimJob:
    """One request. ``probe`` marks the jobs that must succeed once the faults have stopped.

    With a ``chain`` it is a pull of what ``prefill`` holds.
    """

    room: Room
    number: int
    request: Request
    pushes: tuple[SimPush, ...]
    decode: str
    deadline_s: float
    metadata: bytes
    probe: bool = False
    pace_s: float = 0.0
    prefill: str = PREFILL
    chain: PrefixChain | None = None
    held: SimHolding = SimHolding(0, 0)

    @property
    def digest(self) -> bytes:
        """The digest by which both sides recognise the request."""
        if self.chain is not None:
            return self.chain.digest(self.request.num_tokens)
        return f"request {self.number}".encode()


def draw_pushes(rng: random.Random, chunks: Iterable[Span], num_layers: int) -> tuple[SimPush, ...]:
    """Cut chunks into pushes, some of them by layers and out of order; all is covered once."""
    pushes = []
    chunks = list(chunks)
    by_layers, rows = rng.random() < 0.6, rng.random() < 0.5
    for chunk in chunks:
        states = rows and chunk is chunks[-1]
        cut = by_layers and rng.random() < 0.7
        pushes += layer_by_layer(chunk, num_layers, states) if cut else [SimPush(chunk)]
    if by_layers and rng.random() < 0.5:
        rng.shuffle(pushes)
    return tuple(pushes)


def layer_by_layer(chunk: Span, num_layers: int, states: bool = False) -> list[SimPush]:
    """Return one push for each layer of a chunk."""
    return [SimPush(chunk, Span(layer, layer + 1), states) for layer in range(num_layers)]
