"""Copies on a GPU as the owner sees them, with a GPU that does what a test says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from endpoint.jobs import NUM_BYTES, bulk, gather, scatter

from kvferry.endpoint.jobs import CopyJob, ScatterJob
from kvferry.endpoint.loop.gpu_copies import MAX_BATCH, GpuCopies
from kvferry.errors import InputError, TransportError
from kvferry.memory.copy.gpu_tables import GpuCopy
from kvferry.plan.bind import Binding


def told(jobs: Iterable[CopyJob]) -> list[tuple[int, str]]:
    """Which have ended, and what is to be said against them."""
    return [(job.op, job.problem if isinstance(job, ScatterJob) else job.detail) for job in jobs]


class Launched:
    """A launch that is over when it is said to be."""

    def __init__(self) -> None:
        self.over = False
        self.problem = ""

    def query(self) -> bool:
        if self.problem:
            raise RuntimeError(self.problem)
        return self.over


class Gpu:
    """Takes launches, unless it refuses."""

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


def unbindable() -> Binding:
    raise InputError("no such page")


def test_what_a_turn_asked_for_is_one_launch() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    for op in range(3):
        copies.submit(scatter(op))
    assert not gpu.launches, "nothing starts before the turn's end"
    copies.launch()
    copies.launch()
    assert [count for count, _ in gpu.launches] == [3]


def test_what_nobody_waits_for_yet_waits_while_there_is_hurry() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
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
    assert [news.op for news in copies.finished()] == [2, 3, 1]


def test_what_can_be_done_at_leisure_is_done_once_when_nothing_runs() -> None:
    gpu, done = Gpu(), list[int]()
    copies = GpuCopies(gpu)
    copies.submit(scatter(1, when_idle=lambda: done.append(1)))
    copies.submit(scatter(2))
    copies.launch()
    copies.launch()
    assert not done
    gpu.launches[0][1].over = True
    assert len(list(copies.finished())) == 2
    assert not done, "first others hear of the end"
    copies.launch()
    copies.launch()
    assert done == [1]


def test_no_launch_is_too_large() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    for op in range(MAX_BATCH + 1):
        copies.submit(scatter(op))
    copies.launch()
    assert [count for count, _ in gpu.launches] == [MAX_BATCH, 1]


def test_ends_are_told_once_and_when_the_gpu_is_done() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    assert copies.wakeup() == inf
    for op in (1, 2):
        copies.submit(scatter(op))
        copies.launch()
    first, second = (launched for _, launched in gpu.launches)
    second.over = True
    assert list(copies.finished()) == [], "a stream ends its launches in their order"
    assert copies.wakeup() < 1e-3
    first.over = True
    assert told(copies.finished()) == [(1, ""), (2, "")]
    assert list(copies.finished()) == []
    assert copies.wakeup() == inf


def test_what_was_gathered_is_to_be_written() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    job = gather(7)
    copies.submit(job)
    copies.launch()
    gpu.launches[0][1].over = True
    assert list(copies.finished()) == [job]
    assert (job.binding, job.is_over) == (bulk(), False)


def test_what_was_gathered_ahead_is_told_with_its_size() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    job = gather(7, early=True)
    copies.submit(job)
    copies.launch()
    gpu.launches[0][1].over = True
    assert list(copies.finished()) == [job]
    assert (job.num_bytes, job.binding.parts, job.is_over) == (NUM_BYTES, (), False)


def test_pages_that_are_wrong_fail_one_copy_and_no_other() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    copies.submit(scatter(1, unbindable))
    copies.submit(scatter(2))
    copies.launch()
    gpu.launches[0][1].over = True
    assert sorted(told(copies.finished())) == [(1, "no such page"), (2, "")]


def test_a_gpu_that_has_failed() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    copies.submit(gather(1))
    copies.launch()
    gpu.launches[0][1].problem = "an illegal address"
    assert told(copies.finished()) == [(1, "the GPU failed: an illegal address")]


def test_a_launch_that_is_refused_is_over_before_that_is_told() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    gpu.refuses = "the GPU took no copy"
    copies.submit(scatter(1))
    copies.launch()
    assert gpu.drained == 1
    assert told(copies.finished()) == [(1, "the GPU took no copy")]


def test_what_may_come_soon_is_told_to_the_gpu_and_launches_nothing() -> None:
    gpu, binding = Gpu(), bulk()
    copies = GpuCopies(gpu)
    copies.prebind(binding, (7,), (0, 0))
    copies.launch()
    assert gpu.prebound == [GpuCopy(binding, (7,), (0, 0))]
    assert gpu.prebound[0].binding is binding
    assert not gpu.launches


def test_closing_waits_for_what_runs() -> None:
    gpu = Gpu()
    copies = GpuCopies(gpu)
    copies.submit(scatter(1))
    copies.launch()
    copies.close()
    assert gpu.drained == 1
