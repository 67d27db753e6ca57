"""A fleet: real processes, one per rank, with bytes that can be checked.

For tests of kvferry and of engines that use it, and for measurements. A ``Fleet`` starts prefill
and decode ranks with real endpoints over a real transport. It fills rooms with a pattern that says
where every byte belongs; targets compare every byte of their pools, including those that must not
change.
"""

from kvferry.testing.fleet.fleet import Cut, Fleet, FleetSide
from kvferry.testing.fleet.process import RankError, RankProcess
from kvferry.testing.fleet.worker import RankSpec

__all__ = ["Cut", "Fleet", "FleetSide", "RankError", "RankProcess", "RankSpec"]
