"""An exhaustive check of a small model, through the real machines.

``explore(model, faults)`` visits every world that one room from one source rank
to two target ranks can get into, whatever the order of frames, notes, writes,
scatters and engine calls, with at most one fault at any point of it, and checks
the promises in each. What it finds comes with a shortest trace.

What the model leaves out, and the seeded simulator has: more than one room, so
that slots and turns are contended between rooms; more than one source rank;
restarts under a new incarnation, strangers, other versions, malformed bytes;
several faults on one path. Clocks run evenly, and time passes only when nothing
is due, except where a fault says otherwise (``TICK``, ``DEADLINE``, ``SILENCE``,
``DELAY``, ``STALL``). An engine calls nothing more once it was told of the end.
Bytes are not modelled, only which parcels are where.

Single-threaded, no clock, no randomness.
"""

from kvferry.testing.explore.cases import Case, cases
from kvferry.testing.explore.model import (
    CHUNKED,
    DIRECT,
    LAYERED,
    MODELS,
    STAGED,
    STATE,
    ExploredModel,
    ModelFault,
)
from kvferry.testing.explore.search import ModelViolation, SearchResult, explore

__all__ = [
    "CHUNKED",
    "DIRECT",
    "LAYERED",
    "MODELS",
    "STAGED",
    "STATE",
    "Case",
    "ExploredModel",
    "ModelFault",
    "ModelViolation",
    "SearchResult",
    "cases",
    "explore",
]
