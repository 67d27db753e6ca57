"""The simulator: the real machines in simulated time, network, memory and processes.

``run_seed`` runs one random world. ``SCENARIOS`` are named situations in which other systems
have failed. ``BREAKS`` are deliberately broken rules that show what the simulator catches.
A result's ``violations`` are the promises that were broken, each with its seed and history.
"""

from kvferry.testing.sim import pull_breaks as _pull_breaks  # noqa: F401 - fills BREAKS
from kvferry.testing.sim import runner_breaks as _runner_breaks  # noqa: F401 - fills BREAKS
from kvferry.testing.sim.breaks import BREAKS
from kvferry.testing.sim.run import SimResult, hunt, run_scenario, run_seed
from kvferry.testing.sim.scenarios import SCENARIOS
from kvferry.testing.sim.world import Faults, Violation, World

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
]
