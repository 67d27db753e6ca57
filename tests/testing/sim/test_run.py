"""The simulator with the real machines, and with machines that break a rule."""

from __future__ import annotations

import pytest

from kvferry.testing.sim import BREAKS, SCENARIOS, hunt, run_scenario, run_seed

# Enough to matter in `make test`; `kvferry sim --seeds 20000` is the longer run.
NUM_SEEDS, CHUNK = 400, 25


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_every_promise_holds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        result = run_seed(seed)
        assert not result.violations, result.violations[0][1]
        assert result.done >= 2, "the rooms after the faults must be done"


# The simulator's own checks once failed these. 2517864: a write's fate becomes unknown 1.27 s after
# the faults stopped. 2569655: an old frame of a silent peer is replayed. 3072670 and 3079179: a
# source gets pages for a declined room only after the Abort has expired, so its deadline ends it.
@pytest.mark.parametrize("seed", [2517864, 2569655, 3072670, 3079179])
def test_seeds_that_once_failed_pass(seed: int) -> None:
    assert not run_seed(seed).violations


# A process that was stopped while its loop slept called a peer silent too early, because its runner
# did not report a turn that was late by up to half a heartbeat.
@pytest.mark.parametrize("seed", [508002354, 509004033, 510000551])
def test_short_stops_do_not_count_as_silence(seed: int) -> None:
    assert not run_seed(seed).violations


# An engine found a prefix 1.5 s after the last asker had given up, and kept it until the deadline.
@pytest.mark.parametrize("seed", [1094, 920002977])
def test_a_prefix_found_too_late_is_released(seed: int) -> None:
    assert not run_seed(seed).violations


# A holder's lead died when one rank had its answer, and its successor answered the other one 0.
def test_ranks_of_one_instance_pull_one_length() -> None:
    assert not run_seed(3090002641).violations


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_passes(name: str) -> None:
    for seed in range(4):
        result = run_scenario(name, seed)
        assert not result.violations, result.violations[0][1]


def test_every_known_failure_has_a_scenario() -> None:
    rows = [f"{kind}{n}" for kind, last in zip("CSLPA", (11, 8, 11, 9, 12), strict=True)
            for n in range(1, last + 1)]  # fmt: skip
    assert list(SCENARIOS) == rows


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_caught(name: str) -> None:
    caught = hunt(name, range(300))
    assert caught is not None
    assert "seed" in caught[1]


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        ("shared-key", "C1"),
        ("metadata-with-state", "C2"),
        ("state-expected", "C2"),
        ("done-before-scatter", "C4"),
        ("count-messages", "C6"),
        ("duplicate-arrival", "C6"),
        ("digest-ignored", "C10"),
        ("layer-for-all", "C11"),
        ("leak-credits", "S1"),
        ("overcommit", "S2"),
        ("refill-slot", "S3"),
        ("refill-discarded", "S7"),
        ("refill-taken-back", "S8"),
        ("drained-at-once", "L1"),
        ("release-at-abort", "L1"),
        ("release-while-writing", "L5"),
        ("silence-is-proof", "L6"),
        ("keep-early-offers", "L7"),
        ("stale-incarnation", "P1"),
        ("accept-any-model", "P3"),
        ("answer-each-ask", "A1"),
        ("ask-once", "A2"),
        ("ignore-the-answer", "A3"),
        ("unpin-early", "A5"),
        ("digest-ignored", "A6"),
        ("pin-for-long", "A7"),
        ("decline-silently", "A9"),
        ("close-for-some-ranks", "A12"),
    ],
)
def test_the_scenario_of_a_mistake_catches_it(name: str, scenario: str) -> None:
    results = (run_scenario(scenario, seed, BREAKS[name].machines) for seed in range(20))
    assert any(result.violations for result in results)


def test_the_same_seed_gives_the_same_world() -> None:
    one, two = run_seed(88), run_seed(88)
    assert (one.steps, one.done, one.faults) == (two.steps, two.done, two.faults)
    broken = BREAKS["close-early"]
    texts = [run_seed(0, broken.machines, broken.faults).violations[0][1] for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("seed 0, t=")
    assert "decode0/" in texts[0]
