"""Tests that the GPU copier copies as the reference does, and that it never waits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from moving import Bytes, Rank, expected, filled, make_ranks, random_cache

from kvferry.errors import InputError
from kvferry.layout import CacheSpec, DType, Layout, Order, Parallel, attention
from kvferry.layout.spec import Group, Paged, StateRow, Tensor, Window
from kvferry.memory.copy.gpu_tables import LARGE_BYTES
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import (
    Base,
    Binding,
    PagedView,
    PageTable,
    Placement,
    Plan,
    PoolMap,
    RankPair,
    Request,
    StagingView,
    bind,
    check,
    reshard,
)
from kvferry.plan.bind import BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.regions import Device

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvferry.memory.copy.gpu import MAX_PREBOUND, GpuCopier, GpuCopy

pytestmark = pytest.mark.gpu

MARK = 0xEE
NO_STRIDE = Stride(0, 0)
# A tenth of a second in cycles of the GPU's clock.
A_WHILE = 200_000_000


@pytest.fixture(scope="module")
def copier() -> GpuCopier:
    return GpuCopier(Device("cuda"))


def on_gpu(region: Bytes, shift: int = 0) -> torch.Tensor:
    """Return the bytes in GPU memory, ``shift`` bytes after an aligned address."""
    memory = torch.empty(len(region) + shift, dtype=torch.uint8, device="cuda")
    memory[shift:] = torch.from_numpy(region)
    return memory[shift:]


def addresses(regions: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(region.data_ptr() for region in regions)


class Moving:
    """A request that is copied from one side to the other through slots, all in GPU memory."""

    def __init__(self, plan: Plan, request: Request, seed: int, shift: int = 0) -> None:
        check(plan)
        rng = np.random.default_rng(seed)
        cache = random_cache(plan.spec, request.num_tokens, rng)
        self.plan, self.request, self.shift = plan, request, shift
        self.sources = filled(plan.source, cache, request, rng)
        self.targets = make_ranks(plan.target, request.num_tokens, rng)
        self.wanted = expected(self.targets, cache, request)
        self.held = [self._upload(rank) for rank in self.sources]
        self.memory = [self._upload(rank) for rank in self.targets]
        torch.cuda.synchronize()  # the copier's stream does not wait for this one

    def _upload(self, rank: Rank) -> list[torch.Tensor]:
        return [on_gpu(region, self.shift) for region in rank.regions]

    def stage(self, copier: GpuCopier) -> None:
        """Gather for all targets at once, check each slot, scatter from all sources at once."""
        slots = {
            RankPair(source, target): self._slot(RankPair(source, target))
            for source in range(len(self.sources))
            for target in self.plan.targets_of(source)
        }
        for source in range(len(self.sources)):
            pairs = [pair for pair in slots if pair.source == source]
            copier.copy([self._gather(pair, slots[pair]) for pair in pairs]).synchronize()
        for pair, slot in slots.items():
            np.testing.assert_array_equal(slot.cpu().numpy(), self._reference_slot(pair))
        for target in range(len(self.targets)):
            pairs = [pair for pair in slots if pair.target == target]
            copier.copy([self._scatter(pair, slots[pair]) for pair in pairs]).synchronize()

    def direct(self, copier: GpuCopier, *, merged: bool = False) -> None:
        """Copy straight from pages to pages, everything in one call."""
        jobs = []
        for source in range(len(self.sources)):
            for target in self.plan.targets_of(source):
                ours, theirs = self.sources[source].side, self.targets[target].side
                binding = bind(self.plan, RankPair(source, target), self.request, ours, theirs)
                binding = binding.merged() if merged else binding
                held, memory = self.held[source], self.memory[target]
                jobs.append(GpuCopy(binding, addresses(held), addresses(memory)))
        copier.copy(jobs).synchronize()

    def assert_arrived(self) -> None:
        for memory, regions in zip(self.memory, self.wanted, strict=True):
            for got, want in zip(memory, regions, strict=True):
                np.testing.assert_array_equal(got.cpu().numpy(), want)

    def _slot(self, pair: RankPair) -> torch.Tensor:
        size = sum(self.plan.bytes_of(m, self.request) for m in self.plan.between(*pair))
        slot = on_gpu(np.full(size, MARK, dtype=np.uint8), self.shift)
        torch.cuda.synchronize()
        return slot

    def _gather(self, pair: RankPair, slot: torch.Tensor) -> GpuCopy:
        ours = self.sources[pair.source].side
        binding = bind(self.plan, pair, self.request, ours, StagingView())
        return GpuCopy(binding, addresses(self.held[pair.source]), (slot.data_ptr(),))

    def _scatter(self, pair: RankPair, slot: torch.Tensor) -> GpuCopy:
        theirs = self.targets[pair.target].side
        binding = bind(self.plan, pair, self.request, StagingView(), theirs)
        return GpuCopy(binding, (slot.data_ptr(),), addresses(self.memory[pair.target]))

    def _reference_slot(self, pair: RankPair) -> Bytes:
        source = self.sources[pair.source]
        binding = bind(self.plan, pair, self.request, source.side, StagingView())
        slot = np.full(binding.num_bytes, MARK, dtype=np.uint8)
        copy_pieces(binding.descriptors(), source.regions, [slot])
        return slot


def plan_of(
    spec: CacheSpec, tp: tuple[int, int], page: tuple[int, int], order: tuple[Order, Order]
) -> Plan:
    source, target = (
        Layout(spec, Parallel(tp=t), page_tokens=p, order=o)
        for t, p, o in zip(tp, page, order, strict=True)
    )
    return reshard(source, target)


ORDERS = [(ours, theirs) for ours in Order for theirs in Order]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("dims", [(128, 128), (80, 80), (33, 7), (192, 128), (1, 3)])
def test_every_dtype_and_dim(
    copier: GpuCopier, dtype: DType, dims: tuple[int, int], order: tuple[Order, Order]
) -> None:
    spec = attention(layers=3, kv_heads=4, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    plan = plan_of(spec, (2, 4), (4, 16), order)
    moving = Moving(plan, Request(37, 3), seed=1)
    moving.stage(copier)
    moving.assert_arrived()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page", [1, 2, 3, 16, 48, 64, 128])
@pytest.mark.parametrize("tp", [(4, 1), (1, 4), (2, 4), (1, 1), (8, 2)])
def test_every_page_size(
    copier: GpuCopier, page: int, tp: tuple[int, int], order: tuple[Order, Order]
) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=64)
    for theirs in (page, 64):
        moving = Moving(plan_of(spec, tp, (page, theirs), order), Request(150), seed=page)
        moving.stage(copier)
        moving.assert_arrived()


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_pages_to_pages(copier: GpuCopier, order: tuple[Order, Order], merged: bool) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=128)
    for tp in ((1, 1), (4, 2), (1, 4)):
        moving = Moving(plan_of(spec, tp, (16, 16), order), Request(100), seed=5)
        moving.direct(copier, merged=merged)
        moving.assert_arrived()


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 12])
def test_any_alignment(copier: GpuCopier, shift: int) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=128)
    moving = Moving(plan_of(spec, (4, 1), (16, 16), ORDERS[0]), Request(50), seed=2, shift=shift)
    moving.stage(copier)
    moving.assert_arrived()


def test_groups_of_every_kind_and_width_in_one_call(copier: GpuCopier) -> None:
    groups = (
        Group("kv", Paged(), (0, 2), 4, (Tensor("k", DType.BFLOAT16, 128),)),
        Group("window", Window(20), (1,), 4, (Tensor("k", DType.FLOAT8_E4M3, 72),)),
        Group("latent", Paged(), (0, 1, 2), 1, (Tensor("c", DType.BFLOAT16, 576),)),
        Group("scales", Paged(), (0, 1, 2), 4, (Tensor("s", DType.FLOAT32, 1),)),
        Group("state", StateRow(), (1, 2), 8, (Tensor("h", DType.FLOAT32, 1030),)),
    )
    plan = plan_of(CacheSpec(3, groups), (4, 2), (16, 8), ORDERS[1])
    moving = Moving(plan, Request(70, 10), seed=3)
    moving.stage(copier)
    moving.assert_arrived()


def test_merged_runs_of_very_different_lengths(copier: GpuCopier) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=128)
    plan = plan_of(spec, (1, 1), (64, 64), (Order.NHD, Order.NHD))
    moving = Moving(plan, Request(64 * 20 - 5), seed=4)
    for rank in (*moving.sources, *moving.targets):
        rank.side.tables["kv"] = PageTable([*range(12), 30, 29, 28, *range(17, 22)])
    moving.direct(copier, merged=True)
    pages = torch.tensor(moving.targets[0].side.tables["kv"].pages.tolist())
    for source, target in zip(moving.held[0], moving.memory[0], strict=True):
        ours, theirs = (m.view(-1, 64 * 4 * 256)[pages].view(-1, 4 * 256) for m in (source, target))
        assert torch.equal(ours[: 64 * 20 - 5], theirs[: 64 * 20 - 5])


def test_offsets_beyond_four_gib(copier: GpuCopier) -> None:
    """Pages and layers of a pool that is too large for 32-bit addresses."""
    spec, gib = attention(layers=2, kv_heads=2, head_dim=128), 1 << 30
    layout = Layout(spec, page_tokens=64)
    page = 64 * 2 * 256
    num_pages = (5 * gib // 4) // page
    # One region of 5 GiB: K and V of two layers, one after another.
    placements = tuple(
        Placement("kv", name, page, 512, 256, num_pages,
                  tuple(Base(layer, 0, (2 * layer + i) * num_pages * page) for layer in (0, 1)))
        for i, name in enumerate("kv")
    )  # fmt: skip
    pool = torch.randint(-(2**62), 2**62, (5 * gib // 8,), device="cuda").view(torch.uint8)
    pages = np.array([num_pages - 1, 0, num_pages // 2, 1, num_pages - 2, 77])
    side = PagedView(PoolMap(placements), {"kv": PageTable(pages)})
    plan, request = reshard(layout, layout), Request(64 * len(pages))
    gather = bind(plan, RankPair(0, 0), request, side, StagingView())
    slot = torch.empty(gather.num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copier.copy([GpuCopy(gather, (pool.data_ptr(),), (slot.data_ptr(),))]).synchronize()
    index = torch.from_numpy(pages).cuda()
    view = pool.view(4, num_pages, page)
    assert torch.equal(view[:, index].reshape(-1), slot)

    wanted = slot.clone()
    view[:, index] = MARK
    torch.cuda.synchronize()
    scatter = bind(plan, RankPair(0, 0), request, StagingView(), side)
    copier.copy([GpuCopy(scatter, (slot.data_ptr(),), (pool.data_ptr(),))]).synchronize()
    assert torch.equal(view[:, index].reshape(-1), wanted)


def test_tensors_with_the_same_pieces(copier: GpuCopier) -> None:
    """K and V with the same pieces are one part with twice the layers."""
    _, (job, _), (slot, _) = _one_page()
    first, second = job.binding.parts
    shared = Binding((first, second._replace(pieces=first.pieces)))
    copier.copy([job]).synchronize()
    wanted = slot.clone()
    slot.fill_(MARK)
    torch.cuda.synchronize()
    copier.copy([job._replace(binding=shared)]).synchronize()
    assert torch.equal(slot, wanted)


def test_a_large_job_and_small_ones(copier: GpuCopier) -> None:
    """The first is queued by itself, but the event is for all jobs."""
    sizes, one = (LARGE_BYTES + 4096, 4096, 40), np.ones(1, dtype=np.int64)
    base = (Base(0, 0, 0),)
    source = [torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda") for n in sizes]
    target = [torch.zeros_like(region) for region in source]
    torch.cuda.synchronize()
    jobs = []
    for size, ours, theirs in zip(sizes, source, target, strict=True):
        pieces = Pieces(0 * one, 0 * one, size * one, one, one, NO_STRIDE, NO_STRIDE, False)
        part = BindingPart("kv", "k", base, base, pieces)
        jobs.append(GpuCopy(Binding((part,)), (ours.data_ptr(),), (theirs.data_ptr(),)))
    copier.copy(jobs).synchronize()
    for ours, theirs in zip(source, target, strict=True):
        assert torch.equal(ours, theirs)


def _one_page(tokens: int = 64) -> tuple[Moving, list[GpuCopy], list[torch.Tensor]]:
    spec = attention(layers=2, kv_heads=4, head_dim=128)
    moving = Moving(plan_of(spec, (1, 2), (64, 64), ORDERS[0]), Request(tokens), seed=6)
    pairs = [RankPair(0, 0), RankPair(0, 1)]
    slots = [moving._slot(pair) for pair in pairs]
    jobs = [moving._gather(pair, slot) for pair, slot in zip(pairs, slots, strict=True)]
    return moving, jobs, slots


def test_copy_starts_after_the_event_and_never_waits(copier: GpuCopier) -> None:
    copier.warm_up()
    moving, jobs, slots = _one_page()
    right = [region.clone() for region in moving.held[0]]
    for region in moving.held[0]:
        region.zero_()
    torch.cuda.synchronize()
    writer = torch.cuda.Stream()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(A_WHILE)
        for region, bytes_ in zip(moving.held[0], right, strict=True):
            region.copy_(bytes_)
        written = torch.cuda.Event()
        written.record()
    done = copier.copy(jobs, after=written)
    assert not done.query(), "the call waited for the GPU, or did not wait for the event"
    done.synchronize()
    for slot, pair in zip(slots, (RankPair(0, 0), RankPair(0, 1)), strict=True):
        np.testing.assert_array_equal(slot.cpu().numpy(), moving._reference_slot(pair))


def test_calls_in_flight_have_separate_tables(copier: GpuCopier) -> None:
    copier.warm_up()
    cases = [_one_page(tokens) for tokens in range(1, 65)]
    held_up = torch.cuda.Event()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
        held_up.record()
    events = [copier.copy(jobs, after=held_up) for _, jobs, _ in cases]
    assert not events[-1].query()
    events[-1].synchronize()
    assert all(event.query() for event in events)
    for moving, _, slots in cases:
        for slot, pair in zip(slots, (RankPair(0, 0), RankPair(0, 1)), strict=True):
            np.testing.assert_array_equal(slot.cpu().numpy(), moving._reference_slot(pair))


def _scattered(tokens: int = 64) -> tuple[Moving, GpuCopy]:
    """Return a scatter job whose slot has the bytes of the request."""
    spec = attention(layers=2, kv_heads=4, head_dim=128)
    moving = Moving(plan_of(spec, (1, 1), (16, 16), ORDERS[0]), Request(tokens), seed=tokens)
    slot = on_gpu(moving._reference_slot(RankPair(0, 0)))
    moving.held.append([slot])  # It lives as long as the rest.
    torch.cuda.synchronize()
    return moving, moving._scatter(RankPair(0, 0), slot)


@pytest.mark.parametrize("shift", [0, 4096, 8])
def test_prebound_copy_uses_the_actual_source(copier: GpuCopier, shift: int) -> None:
    """It does so even if the table cannot be moved, and if the expected address is invalid."""
    moving, job = _scattered()
    guess = job._replace(sources=(job.sources[0] - shift,))
    copier.prebind(guess)
    copier.prebind(guess)
    copier.copy([job]).synchronize()
    moving.assert_arrived()


def test_prebound_copy_may_come_with_others_or_never(copier: GpuCopier) -> None:
    cases = [_scattered(tokens) for tokens in range(1, MAX_PREBOUND + 9)]
    for _, job in cases:
        copier.prebind(job)
    for moving, job in cases[:3]:
        copier.copy([job]).synchronize()
        moving.assert_arrived()
    rest = cases[3::2]
    copier.copy([job for _, job in rest]).synchronize()
    for moving, _ in rest:
        moving.assert_arrived()
    again, job = _scattered(5)
    copier.copy([job]).synchronize()
    again.assert_arrived()


def test_copier_may_be_made_on_any_thread() -> None:
    moving, jobs, slots = _one_page()

    def own() -> None:
        copier = GpuCopier(Device("cuda"))
        copier.warm_up()
        copier.copy(jobs).synchronize()

    thread = threading.Thread(target=own)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for slot, pair in zip(slots, (RankPair(0, 0), RankPair(0, 1)), strict=True):
        np.testing.assert_array_equal(slot.cpu().numpy(), moving._reference_slot(pair))


def test_copier_may_be_passed_to_another_thread(copier: GpuCopier) -> None:
    moving, jobs, slots = _one_page()
    thread = threading.Thread(target=lambda: copier.copy(jobs).synchronize())
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    np.testing.assert_array_equal(slots[0].cpu().numpy(), moving._reference_slot(RankPair(0, 0)))


def test_empty_copy_is_done_at_once(copier: GpuCopier) -> None:
    done = copier.copy([])
    done.synchronize()
    assert done.query()


def test_host_memory_is_refused() -> None:
    with pytest.raises(InputError, match="CUDA device"):
        GpuCopier(Device())
