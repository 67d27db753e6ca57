"""GPU copies as the loop sees them, with a scripted GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from endpoint.jobs import NUM_BYTES, bulk, gather, scatter

from kvferry.endpoint.jobs import CopyJob, ProofJob, WriteJob
from kvferry.endpoint.loop.gpu_copies import MAX_BATCH, GpuCopies
from kvferry.errors import InputError, TransportError
from kvferry.memory.copy.gpu_tables import GpuCopy
from kvferry.plan.bind import Binding


def results_of(jobs: Iterable[CopyJob | ProofJob]) -> list[tuple[int, str]]:
    """Return number and problem of each finished job."""
    return [
        (job.action.op, job.detail if isinstance(job, WriteJob) else job.problem) for job in jobs
    ]


class Launched:
    """A launch that ends when a test says so."""

    def __init__(self) -> None:
        self.over = False
        self.problem = ""

    def query(self) -> bool:
        if self.problem:
            raise RuntimeError(self.problem)
        return self.over


class Gpu:
    """A GPU that records launches, or refuses them."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, Launched]] = []
        self.refuses = ""
        self.drained = 0
        self.prebound: list[GpuCopy] = []

    def copy(self, jobs: Sequence[GpuCopy]) -> Launched:
        if self.refuses:
            raise TransportError(self.refuses)
        self.launches.append((len(jobs), Launched()))
        return self.launches[-1][1]

    def prebind(self, job: GpuCopy) -> None:
        self.prebound.append(job)

    def drain(self) -> None:
        self.drained += 1


def copies_on(gpu: Any) -> GpuCopies:
    return GpuCopies(gpu)


def unbindable() -> Binding:
    raise InputError("no such page")


def test_the_copies_of_a_turn_are_one_launch() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    for op in range(3):
        copies.submit(scatter(op))
    assert not gpu.launches, "nothing starts before the end of the turn"
    copies.launch()
    copies.launch()
    assert [count for count, _ in gpu.launches] == [3]


def test_early_gathers_are_postponed_while_urgent() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    for job in (gather(1, early=True), scatter(2), gather(3)):
        copies.submit(job)
    copies.launch(urgent=True)
    assert [count for count, _ in gpu.launches] == [2]
    copies.launch(urgent=True)
    assert len(gpu.launches) == 1
    copies.launch()
    assert [count for count, _ in gpu.launches] == [2, 1]
    for _, launched in gpu.launches:
        launched.over = True
    assert [news.action.op for news in copies.finished()] == [2, 3, 1]


def test_idle_work_is_done_once_while_nothing_runs() -> None:
    gpu, done = Gpu(), list[int]()
    copies = copies_on(gpu)
    copies.submit(scatter(1, when_idle=lambda: done.append(1)))
    copies.submit(scatter(2))
    copies.launch()
    copies.launch()
    assert not done
    gpu.launches[0][1].over = True
    assert len(list(copies.finished())) == 2
    assert not done, "the end is reported first"
    copies.launch()
    copies.launch()
    assert done == [1]


def test_a_launch_has_at_most_the_maximum_batch() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    for op in range(MAX_BATCH + 1):
        copies.submit(scatter(op))
    copies.launch()
    assert [count for count, _ in gpu.launches] == [MAX_BATCH, 1]


def test_each_end_is_reported_once_after_the_gpu_is_done() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    assert copies.wakeup() == inf
    for op in (1, 2):
        copies.submit(scatter(op))
        copies.launch()
    first, second = (launched for _, launched in gpu.launches)
    second.over = True
    assert list(copies.finished()) == [], "launches of a stream end in order"
    assert copies.wakeup() < 1e-3
    first.over = True
    assert results_of(copies.finished()) == [(1, ""), (2, "")]
    assert list(copies.finished()) == []
    assert copies.wakeup() == inf


def test_a_gathered_slot_is_bound_for_its_write() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    job = gather(7)
    copies.submit(job)
    copies.launch()
    gpu.launches[0][1].over = True
    assert list(copies.finished()) == [job]
    assert (job.binding, job.is_over) == (bulk(), False)


def test_an_early_gather_ends_with_its_size() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    job = gather(7, early=True)
    copies.submit(job)
    copies.launch()
    gpu.launches[0][1].over = True
    assert list(copies.finished()) == [job]
    assert (job.num_bytes, job.binding.parts, job.is_over) == (NUM_BYTES, (), False)


def test_wrong_pages_fail_one_copy_only() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    copies.submit(scatter(1, unbindable))
    copies.submit(scatter(2))
    copies.launch()
    gpu.launches[0][1].over = True
    assert sorted(results_of(copies.finished())) == [(1, "no such page"), (2, "")]


def test_a_failed_gpu_fails_its_copies() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    copies.submit(gather(1))
    copies.launch()
    gpu.launches[0][1].problem = "an illegal address"
    assert results_of(copies.finished()) == [(1, "the GPU failed: an illegal address")]


def test_a_refused_launch_is_drained_before_it_fails() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    gpu.refuses = "the GPU took no copy"
    copies.submit(scatter(1))
    copies.launch()
    assert gpu.drained == 1
    assert results_of(copies.finished()) == [(1, "the GPU took no copy")]


def test_prebinding_launches_nothing() -> None:
    gpu, binding = Gpu(), bulk()
    copies = copies_on(gpu)
    copies.prebind(binding, (7,), (0, 0))
    copies.launch()
    assert gpu.prebound == [GpuCopy(binding, (7,), (0, 0))]
    assert gpu.prebound[0].binding is binding
    assert not gpu.launches


def test_closing_waits_for_what_runs() -> None:
    gpu = Gpu()
    copies = copies_on(gpu)
    copies.submit(scatter(1))
    copies.launch()
    copies.close()
    assert gpu.drained == 1
