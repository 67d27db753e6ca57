"""Judges: what is asked, in the order of its cost, whether it notices a mutant."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

# Enough for most mistakes in a few seconds; a seed that is needed is worth a scenario.
NUM_SEEDS = 100


@dataclass(frozen=True)
class Judge:
    """Which modules it may know about, and its tests; without any it is the simulator."""

    name: str
    concerns: tuple[str, ...]
    tests: tuple[str, ...] = ()

    def is_content(self) -> bool:
        """Ask it, in this process."""
        return _passes(self.tests) if self.tests else _simulates()


def _simulates() -> bool:
    from kvferry.testing.sim import SCENARIOS, run_scenario, run_seed  # noqa: PLC0415

    scenarios = (run_scenario(name) for name in SCENARIOS)
    seeds = (run_seed(seed) for seed in range(NUM_SEEDS))
    return not any(result.violations for result in chain(scenarios, seeds))


def _passes(tests: tuple[str, ...]) -> bool:
    import pytest  # noqa: PLC0415

    quiet = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-n0")
    return int(pytest.main([*quiet, "--assert=plain", *tests])) == 0


def _tests(folder: str, names: str) -> tuple[str, ...]:
    places = (name.rpartition("/") for name in names.split())
    return tuple(f"tests/{folder}/{place}{slash}test_{name}.py" for place, slash, name in places)


_MACHINES = (
    "room_completes lost_and_repeated_frames abort_at_any_moment room_fails links limits fixed_bugs"
)
_PARTS = (
    "credits request_digests ledger cutting handshake transports layer_pushes checks codec docs"
)
_PIECES = (
    "loop/roles loop/directory loop/writes control/sockets control/unix liveness/lifeline tables "
    "handles agreement memory threads closing static costs layer_push_tuner marks letting_go "
    "layers security"
)
_CARRIED = "tests/endpoint/test_carry.py::test_every_byte_arrives_and_no_other_is_touched"
_PROCESSES = (
    *(f"{_CARRIED}[tp3-tp2-{way}]" for way in ("shm", "nixl")),
    "tests/endpoint/test_faults.py::test_a_failed_room_says_which_pages_are_bad",
    "tests/endpoint/test_faults.py::test_a_short_stop_is_no_death",
)

DRIVEN = ("endpoint/runner", "protocol")
THREADS = ("endpoint", "memory")

JUDGES = (
    Judge("runner", ("endpoint/runner",), _tests("endpoint", "runner/runner")),
    Judge("sim", DRIVEN),
    Judge("machines", DRIVEN, _tests("protocol", _MACHINES)),
    Judge("parts", ("protocol",), _tests("protocol", _PARTS)),
    Judge("pair", THREADS, _tests("endpoint", "pair loop/loop transport_thread liveness/prober")),
    Judge("pieces", THREADS, _tests("endpoint", _PIECES)),
    Judge("processes", THREADS, _PROCESSES),
)


def judges_of(path: str) -> list[Judge]:
    """Who may notice a mistake in that module."""
    runner = "endpoint/runner" in path
    return [
        judge
        for judge in JUDGES
        if any(f"kvferry/{place}" in path for place in judge.concerns)
        and not (runner and judge.concerns == THREADS)
    ]
