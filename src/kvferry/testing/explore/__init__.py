"""An exhaustive check of a small model, with the real machines and runners.

``explore(model, faults)`` visits every state that one room from one source rank to two target
ranks can reach, for every order of frames, notes, writes, scatters and engine calls, with at most
one fault at any point, and checks the promises in each state. A violation comes with a shortest
trace.

The model leaves out what the seeded simulator covers: several rooms that compete for slots, several
source ranks, restarts, strangers, other versions, malformed bytes, and several faults on one path.
Time passes only when nothing is due, except where a fault says otherwise. Bytes are not modelled,
only which blocks are where.
"""

from kvferry.testing.explore.cases import Case, cases
from kvferry.testing.explore.model import MODELS, ExploredModel, ModelFault
from kvferry.testing.explore.search import ModelViolation, SearchResult, explore

__all__ = [
    "MODELS",
    "Case",
    "ExploredModel",
    "ModelFault",
    "ModelViolation",
    "SearchResult",
    "cases",
    "explore",
]
