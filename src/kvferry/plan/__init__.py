"""Plans: who sends what to whom, bound to pages, with a path chosen for it. Pure."""

from kvferry.plan.bind import Binding, Descriptors, Image, Pair, Side, bind
from kvferry.plan.choose import Choice, Path, Shape, choose, shape_of
from kvferry.plan.cost import PRESETS, Constants
from kvferry.plan.estimate import Estimate, estimate
from kvferry.plan.places import (
    Base,
    PageTable,
    Placement,
    PoolMap,
    Pools,
    contiguous_pools,
)
from kvferry.plan.plan import Block, Move, Plan, Request
from kvferry.plan.prove import check
from kvferry.plan.reshard import reshard

__all__ = [
    "PRESETS",
    "Base",
    "Binding",
    "Block",
    "Choice",
    "Constants",
    "Descriptors",
    "Estimate",
    "Image",
    "Move",
    "PageTable",
    "Pair",
    "Path",
    "Placement",
    "Plan",
    "PoolMap",
    "Pools",
    "Request",
    "Shape",
    "Side",
    "bind",
    "check",
    "choose",
    "contiguous_pools",
    "estimate",
    "reshard",
    "shape_of",
]
