"""Tests that the GPU sums cells as the CPU does, in steps, and never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from moving import Bytes, Rank, filled, random_cache
from summing import FULL, cells_of, sums_of

from kvferry.errors import InputError
from kvferry.layout import CacheSpec, DType, Layout, Order, Parallel, attention
from kvferry.layout.spec import Group, Paged, Part, StateRow, Tensor, Window
from kvferry.memory.checksum.gpu_tables import TILE_WORDS, SumTile, tiles_of
from kvferry.plan import Base, PagedView, PageTable, Placement, Plan, RankPair, Request, reshard
from kvferry.plan.content import ALL_CELLS, ProofRequest
from kvferry.plan.places import PoolMap
from kvferry.regions import Device

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvferry.memory.checksum.gpu import STEP_BYTES, GpuCellSums, GpuSummer

pytestmark = pytest.mark.gpu

# A tenth of a second in cycles of the GPU's clock.
A_WHILE = 200_000_000


def on_gpu(region: Bytes, shift: int = 0) -> torch.Tensor:
    """Return the bytes in GPU memory, ``shift`` bytes after an aligned address."""
    memory = torch.empty(len(region) + shift, dtype=torch.uint8, device="cuda")
    memory[shift:] = torch.from_numpy(region)
    return memory[shift:]


def summer_of(plan: Plan, rank: Rank, memory: list[torch.Tensor]) -> GpuSummer:
    addresses = tuple(region.data_ptr() for region in memory)
    tiles = tiles_of(rank.side.pools, plan.spec, addresses)
    return GpuSummer(Device("cuda"), addresses, tiles)


def finished(sums: GpuCellSums) -> bytes:
    while sums.step():
        pass
    sums.event.synchronize()
    return sums.result


def gpu_sums(
    about: tuple[Plan, RankPair, Request], rank: Rank, proof: ProofRequest, shift: int = 0
) -> bytes:
    memory = [on_gpu(region, shift) for region in rank.regions]
    torch.cuda.synchronize()  # the summer's stream does not wait for this one
    cells, entries = cells_of(*about, rank, proof)
    return finished(summer_of(about[0], rank, memory).sum_cells(proof.seed, cells, entries))


def demand_equal(plan: Plan, request: Request, shift: int = 0, share: int = ALL_CELLS) -> None:
    """Compare the sums of every pair of ranks at the source, on the GPU and on the CPU."""
    rng = np.random.default_rng(3)
    proof = ProofRequest(FULL.seed, share)
    for rank in filled(plan.source, random_cache(plan.spec, request.num_tokens, rng), request, rng):
        for target in plan.targets_of(rank.rank):
            about = plan, RankPair(rank.rank, target), request
            assert gpu_sums(about, rank, proof, shift) == sums_of(*about, rank, proof)


def plan_of(spec: CacheSpec, tp: int = 2, page: int = 16, order: Order = Order.NHD) -> Plan:
    source = Layout(spec, Parallel(tp=tp), page_tokens=page, order=order)
    return reshard(source, Layout(spec, Parallel(tp=1), page_tokens=64))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("dims", [(128, 128), (80, 80), (33, 7), (192, 128), (1, 3), (576, 2100)])
def test_every_dtype_and_dim(dtype: DType, dims: tuple[int, int], order: Order) -> None:
    spec = attention(layers=3, kv_heads=4, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    demand_equal(plan_of(spec, order=order), Request(37, 3))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("page", [1, 2, 3, 16, 48, 64, 128])
def test_every_page_size(page: int, order: Order) -> None:
    spec = attention(layers=2, kv_heads=4, head_dim=64)
    demand_equal(plan_of(spec, page=page, order=order), Request(700, 130))


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 12])
def test_any_alignment(shift: int) -> None:
    demand_equal(plan_of(attention(layers=2, kv_heads=4, head_dim=128)), Request(50), shift)


@pytest.mark.parametrize("share", [ALL_CELLS, ALL_CELLS // 3])
def test_groups_of_every_kind(share: int) -> None:
    packed = Tensor.composite("p", Part("v", DType.FLOAT8_E4M3, 448), Part("r", DType.BFLOAT16, 64))
    groups = (
        Group("kv", Paged(), (0, 2), 4, (Tensor("k", DType.BFLOAT16, 128),)),
        Group("window", Window(20), (1,), 4, (Tensor("k", DType.FLOAT8_E4M3, 72),)),
        Group("latent", Paged(), (0, 1, 2), 1, (Tensor("c", DType.BFLOAT16, 576), packed)),
        Group("sparse", Paged(), (0, 1), 1, (packed,), 4),
        Group("scales", Paged(), (0, 1, 2), 4, (Tensor("s", DType.FLOAT32, 1),)),
        Group("state", StateRow(), (1, 2), 8, (Tensor("h", DType.FLOAT32, 1030),)),
    )
    demand_equal(plan_of(CacheSpec(3, groups)), Request(600, 10), share=share)


@pytest.mark.parametrize("sizes", [{"cp": 3}, {"tp": 4, "dcp": 4, "interleave": 16}, {"pp": 3}])
def test_other_parallel_layouts(sizes: dict[str, int]) -> None:
    group = Group("latent", Paged(), (0, 1, 2), 1, (Tensor("c", DType.BFLOAT16, 72),))
    spec = CacheSpec(3, (group,))
    source = Layout(spec, Parallel(**sizes), page_tokens=4)  # type: ignore[arg-type]
    demand_equal(reshard(source, Layout(spec, Parallel(tp=2), page_tokens=8)), Request(900, 21))


@pytest.mark.parametrize("transposed", [("kv.k",), ("kv.k", "kv.v")])
def test_transposed_elements(transposed: tuple[str, ...]) -> None:
    """The elements of a unit are apart, and tokens are next to each other."""
    spec = attention(layers=2, kv_heads=2, head_dim=24)
    layout = Layout(spec, page_tokens=8, order=Order.HND, transposed=transposed)
    demand_equal(reshard(layout, layout), Request(300, 5))


def test_a_flipped_bit_changes_one_cell() -> None:
    plan, rng = (
        plan_of(attention(layers=2, kv_heads=2, head_dim=64), tp=1),
        np.random.default_rng(1),
    )
    request = Request(600)
    (rank,) = filled(plan.source, random_cache(plan.spec, 600, rng), request, rng)
    about = plan, RankPair(0, 0), request
    before = gpu_sums(about, rank, FULL)
    page = int(rank.side.tables["kv"].pages[-1])
    rank.regions[0][page * 16 * 2 * 128 + 5] ^= 1
    one, two = (np.frombuffer(each, np.uint64) for each in (before, gpu_sums(about, rank, FULL)))
    assert np.flatnonzero(one != two).tolist() == [2]


class Large:
    """A pool of several steps on the GPU, summed over all its pages."""

    def __init__(self) -> None:
        layers, num_pages, page = 16, 128, 64 * 8 * 256
        spec = attention(layers=layers, kv_heads=8, head_dim=128)
        layout = Layout(spec, page_tokens=64)
        tensor_bytes = num_pages * page
        placements = tuple(
            Placement("kv", name, page, 8 * 256, 256, num_pages,
                      tuple(Base(layer, 0, (2 * layer + i) * tensor_bytes)
                            for layer in range(layers)))
            for i, name in enumerate("kv")
        )  # fmt: skip
        words = torch.randint(-(2**62), 2**62, (2 * layers * tensor_bytes // 8,), device="cuda")
        self.pool = words.view(torch.uint8)
        torch.cuda.synchronize()
        tables = {"kv": PageTable(np.random.default_rng(2).permutation(num_pages))}
        self.about = reshard(layout, layout), RankPair(0, 0), Request(64 * num_pages)
        self.rank = Rank(layout, 0, PagedView(PoolMap(placements), tables), [])
        self.summer = summer_of(self.about[0], self.rank, [self.pool])

    def sums(self) -> GpuCellSums:
        cells, entries = cells_of(*self.about, self.rank)
        return self.summer.sum_cells(FULL.seed, cells, entries)


def test_a_large_room_takes_several_steps() -> None:
    it = Large()
    sums, steps = it.sums(), 1
    while sums.step():
        steps += 1
    assert steps == 2 * 16 * 128 * 64 * 8 * 256 // STEP_BYTES + 1
    sums.event.synchronize()
    on_host = it.rank._replace(regions=[it.pool.cpu().numpy()])
    assert sums.result == sums_of(*it.about, on_host)


def test_steps_are_queued_without_waiting() -> None:
    it = Large()
    wanted = finished(it.sums())
    with torch.cuda.stream(it.summer.stream):
        torch.cuda._sleep(A_WHILE)
    sums = it.sums()
    sums.step()
    assert not sums.event.query(), "the call waited for the GPU"
    assert finished(sums) == wanted


def test_proofs_in_flight_have_separate_sums() -> None:
    it = Large()
    wanted = finished(it.sums())
    both = [it.sums(), it.sums()]
    more = [True, True]
    while any(more):
        more = [going and one.step() for going, one in zip(more, both, strict=True)]
    for one in both:
        one.event.synchronize()
        assert one.result == wanted


def test_kernels_are_ready_after_the_warm_up() -> None:
    tiles = [SumTile(16, 8, TILE_WORDS // 8, False), SumTile(2, 8, TILE_WORDS // 8, True)]
    summer = GpuSummer(Device("cuda"), (), {("kv", str(tile)): tile for tile in tiles})
    summer.warm_up()
    kernels = [summer.kernel(tile) for tile in tiles]
    assert [summer.kernel(tile) for tile in tiles] == kernels


def test_host_memory_is_refused() -> None:
    with pytest.raises(InputError, match="CUDA device"):
        GpuSummer(Device(), (), {})
