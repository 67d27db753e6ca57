"""Plans: who sends what to whom, bound to pages, with a transfer mode chosen. Pure."""

from kvferry.plan.bind import Binding, Descriptors, PagedView, RankPair, StagingView, bind
from kvferry.plan.choose import BlockShape, Choice, TransferMode, choose, shape_of
from kvferry.plan.cost import PRESETS, LinkCost
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
    "BlockShape",
    "Choice",
    "Descriptors",
    "Estimate",
    "LinkCost",
    "Move",
    "PageTable",
    "PagedView",
    "Placement",
    "Plan",
    "PoolMap",
    "Pools",
    "RankPair",
    "Request",
    "StagingView",
    "TransferMode",
    "bind",
    "check",
    "choose",
    "contiguous_pools",
    "estimate",
    "reshard",
    "shape_of",
]
