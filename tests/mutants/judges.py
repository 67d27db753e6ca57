"""Judges: test selections that may detect a mutant, cheapest first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

# Detects most mutants within seconds. If one needs more seeds, write a scenario for it.
NUM_SEEDS = 100


@dataclass(frozen=True)
class Judge:
    """A selection of tests for some modules. Without tests, it runs the simulator."""

    name: str
    concerns: tuple[str, ...]
    tests: tuple[str, ...] = ()

    def is_content(self) -> bool:
        """Return whether all tests pass, run in this process."""
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
    "room_completes lost_and_repeated_frames abort_at_any_moment room_fails links "
    "bounded_tables fixed_bugs"
)
_PARTS = (
    "credits request_digests ledger cutting handshake transports layer_pushes checks "
    "codec protocol_page"
)
_PIECES = (
    "loop/sides loop/directory loop/writes loop/rooms loop/inbox loop/poller loop/channels "
    "control/sockets control/unix liveness/port handles rank_agreement watchdog "
    "failing_threads closing_an_endpoint same_costs_in_plan_and_doctor layer_push_tuner "
    "unused_state_is_dropped layer_pushes hostile_peers link_costs"
)
_LOOP = "pair_in_process loop/loop transport_thread liveness/prober"
_BYTES = "every_byte_arrives.py::test_every_byte_arrives_and_no_other_is_touched"
_PROCESSES = (
    *(f"tests/endpoint/test_{_BYTES}[tp3-tp2-{way}]" for way in ("shm", "nixl")),
    "tests/endpoint/test_killed_and_stopped_ranks.py::test_a_failed_room_says_which_pages_are_bad",
    "tests/endpoint/test_killed_and_stopped_ranks.py::test_a_short_stop_is_no_death",
)

DRIVEN = ("endpoint/runner", "protocol")
THREADS = ("endpoint", "memory")

JUDGES = (
    Judge("runner", ("endpoint/runner",), _tests("endpoint/runner", "runner sent_frames sessions")),
    Judge("sim", DRIVEN),
    Judge("machines", DRIVEN, _tests("protocol", _MACHINES)),
    Judge("parts", ("protocol",), _tests("protocol", _PARTS)),
    Judge("pair", THREADS, _tests("endpoint", _LOOP)),
    Judge("pieces", THREADS, _tests("endpoint", _PIECES)),
    Judge("processes", THREADS, _PROCESSES),
)


def judges_of(path: str) -> list[Judge]:
    """Return the judges that may detect a mutant of that module."""
    runner = "endpoint/runner" in path
    return [
        judge
        for judge in JUDGES
        if any(f"kvferry/{place}" in path for place in judge.concerns)
        and not (runner and judge.concerns == THREADS)
    ]
