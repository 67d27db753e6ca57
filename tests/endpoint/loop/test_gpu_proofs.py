"""Proofs on a GPU as the loop sees them, with scripted sums."""

from __future__ import annotations

from math import inf
from typing import Any

from endpoint.jobs import PLAN, scatter

from kvferry.endpoint.jobs import ProofJob
from kvferry.endpoint.loop.gpu_copies import GpuCopies
from kvferry.endpoint.loop.gpu_proofs import MAX_STEPS, GpuProofs
from kvferry.errors import InputError
from kvferry.ids import Op
from kvferry.plan import RankPair, Request
from kvferry.plan.content import ALL_CELLS, ProofRequest
from kvferry.protocol.events import Prove


class Step:
    """The end of a step."""

    def __init__(self) -> None:
        self.over = False
        self.problem = ""

    def query(self) -> bool:
        if self.problem:
            raise RuntimeError(self.problem)
        return self.over


class Sums:
    """Sums of so many steps, which end when a test says so."""

    def __init__(self, num_steps: int, refuses: str = "") -> None:
        self.left = num_steps
        self.refuses = refuses
        self.steps: list[Step] = []
        self.drained = 0

    @property
    def event(self) -> Step:
        return self.steps[-1]

    def step(self) -> bool:
        if self.refuses and self.left == 1:
            raise InputError(self.refuses)
        self.left -= 1
        self.steps.append(Step())
        return self.left > 0

    @property
    def result(self) -> bytes:
        assert all(step.over for step in self.steps)
        return b"sums"

    def drain(self) -> None:
        self.drained += 1


def job(op: int, sums: Sums) -> ProofJob:
    about = PLAN, RankPair(0, 0), Request(1), ProofRequest(1, ALL_CELLS)
    return ProofJob(Prove(Op(op), "r", *about), lambda: sums)


def results(proofs: GpuProofs) -> list[tuple[int, bytes | None, str]]:
    return [(one.action.op, one.result, one.problem) for one in proofs.finished()]


def test_a_turn_launches_one_step_and_few_are_in_flight() -> None:
    proofs, sums = GpuProofs(), Sums(5)
    assert proofs.wakeup() == inf
    proofs.submit(job(1, sums))
    assert proofs.wakeup() == 0.0
    launched = []
    for _ in range(MAX_STEPS + 2):
        proofs.launch()
        launched.append(len(sums.steps))
    assert launched == [1, 2, 2, 2]
    assert proofs.wakeup() > 0.0
    sums.steps[0].over = True
    assert results(proofs) == []
    assert proofs.wakeup() == 0.0
    proofs.launch()
    assert len(sums.steps) == 3


def test_a_proof_ends_with_its_last_step() -> None:
    proofs, sums = GpuProofs(), Sums(2)
    proofs.submit(job(1, sums))
    proofs.launch()
    proofs.launch()
    sums.steps[1].over = True
    assert results(proofs) == [], "steps of a stream end in order"
    sums.steps[0].over = True
    assert results(proofs) == [(1, b"sums", "")]
    assert results(proofs) == []
    assert proofs.wakeup() == inf


def test_proofs_follow_each_other() -> None:
    proofs, one, two = GpuProofs(), Sums(1), Sums(1)
    proofs.submit(job(1, one))
    proofs.submit(job(2, two))
    proofs.launch()
    assert (len(one.steps), len(two.steps)) == (1, 0)
    proofs.launch()
    one.steps[0].over = two.steps[0].over = True
    assert [op for op, *_ in results(proofs)] == [1, 2]


def test_wrong_pages_fail_a_proof_after_what_was_launched() -> None:
    proofs, wrong, right = GpuProofs(), Sums(2, "no such page"), Sums(1)
    proofs.submit(job(1, wrong))
    proofs.submit(job(2, right))
    proofs.launch()
    proofs.launch()
    assert wrong.drained == 1
    assert proofs.wakeup() == 0.0
    wrong.steps[0].over = True
    assert results(proofs) == [(1, None, "no such page")]
    proofs.launch()
    right.steps[0].over = True
    assert results(proofs) == [(2, b"sums", "")]


def test_a_failed_gpu_fails_a_proof_once() -> None:
    proofs, sums = GpuProofs(), Sums(4)
    proofs.submit(job(1, sums))
    proofs.launch()
    proofs.launch()
    for step in sums.steps:
        step.problem = "an illegal address"
    assert results(proofs) == [(1, None, "the GPU failed: an illegal address")]
    assert results(proofs) == []
    assert proofs.wakeup() == inf


class Gpu:
    """A GPU that copies at once."""

    def __init__(self) -> None:
        self.drained = 0

    def copy(self, jobs: object) -> Step:
        step = Step()
        step.over = True
        return step

    def drain(self) -> None:
        self.drained += 1


def test_copies_and_proofs_of_a_turn_are_both_launched() -> None:
    gpu: Any = Gpu()
    copies, sums = GpuCopies(gpu), Sums(1)
    copies.submit(job(1, sums))
    copies.submit(scatter(2))
    assert not sums.steps, "nothing starts before the end of the turn"
    copies.launch()
    assert [one.action.op for one in copies.finished()] == [2]
    assert copies.wakeup() < 1e-3
    sums.steps[0].over = True
    assert [one.action.op for one in copies.finished()] == [1]
    assert copies.wakeup() == inf


def test_closing_waits_for_steps() -> None:
    gpu: Any = Gpu()
    copies, sums = GpuCopies(gpu), Sums(2)
    copies.submit(job(1, sums))
    copies.launch()
    copies.close()
    assert (gpu.drained, sums.drained) == (1, 1)
