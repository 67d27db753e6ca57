"""The simulator: the real machines, simulated time, network, memory and death.

``run_seed`` plays one seed; ``SCENARIOS`` are named situations that other
systems have failed in; ``BREAKS`` are deliberately broken machines that show
what the simulator would notice.
"""

from kvferry.testing.sim.breaks import BREAKS
from kvferry.testing.sim.faults import Faults
from kvferry.testing.sim.run import SimResult, hunt, run_scenario, run_seed, run_seeds
from kvferry.testing.sim.scenarios import SCENARIOS
from kvferry.testing.sim.world import Violation, World

__all__ = [
    "BREAKS",
    "SCENARIOS",
    "Faults",
    "SimResult",
    "Violation",
    "World",
    "hunt",
    "run_scenario",
    "run_seed",
    "run_seeds",
]
