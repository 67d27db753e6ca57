"""On a GPU: the engine says what it says on a CPU, and its cache travels when it is computed.

Chunks are queued on the GPU and pushed before they are computed, so a push that did not
wait would send what was in the pages before. A small model is computed too soon to see
that, so here the GPU takes its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
pytest.importorskip("triton")
# The packages that a worker needs beside torch.
pytest.importorskip("aiohttp")
pytest.importorskip("jinja2")
pytest.importorskip("numba")
pytest.importorskip("prometheus_client")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("zmq")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from msgspec.structs import replace
from reference.driving import ask, demand_equal, engine_of, requests
from reference.working import (
    Alone,
    Caller,
    Neighbour,
    Worker,
    all_at_once,
    call,
    hosted,
    options_for,
)

from kvferry import Layers
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.endpoint.outgoing import Outgoing, Waitable
from kvferry.layout.layout import Order, Parallel
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.requests import RequestWork, Sample, StepPlan
from kvferry.reference.models.config import KV
from kvferry.reference.models.tiny import TinyKind, make_tiny
from kvferry.reference.options import InstanceOptions
from kvferry.reference.transfer.extensions import PrefillExtension
from kvferry.transports.registry import load

pytestmark = pytest.mark.gpu

needs_nixl = pytest.mark.skipif(
    load("nixl").missing() is not None, reason="needs NIXL, which can write a GPU"
)
ONE = Parallel()
KINDS = (TinyKind.LLAMA, TinyKind.QWEN3)
# Chunks of three pages.
CUDA = {"device": "cuda", "step_tokens": 48, "max_requests": 8, "prefix_cache": False}
# Over several chunks each, one of them to the end of a page.
PROMPTS = tuple(
    tuple((7 * n + 37 * i * i + 11 * i) % 256 for i in range(n)) for n in (70, 128, 150, 333)
)
# Some fifty milliseconds, in cycles of the GPU's clock.
A_WHILE = 100_000_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[TinyKind, Path]:
    return {kind: make_tiny(tmp_path_factory.mktemp(kind), kind, seed=7) for kind in KINDS}


@pytest.fixture(scope="module")
def discovery() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    made = Neighbour()
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(folders: dict[TinyKind, Path]) -> Alone:
    return Alone(folders)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_computes_what_a_cpu_computes(folders: dict[TinyKind, Path], kind: TinyKind) -> None:
    with engine_of(folders[kind]) as engine:
        right = ask(engine, requests())
    with engine_of(folders[kind], device="cuda") as engine:
        assert engine.ranks.worker.cache.memory.is_cuda
        assert engine.ranks.worker.cache.region.device.kind == "cuda"
        answers = ask(engine, requests())
        again = ask(engine, requests())
    demand_equal(right, answers)
    demand_equal(right, again)


def test_ranks_share_a_gpu(folders: dict[TinyKind, Path]) -> None:
    """Also where there are fewer GPUs than ranks; their tensors meet in host memory."""
    with engine_of(folders[TinyKind.LLAMA]) as engine:
        right = ask(engine, requests())
    with engine_of(folders[TinyKind.LLAMA], Parallel(tp=3), device="cuda") as engine:
        demand_equal(right, ask(engine, requests()))


def sides(folder: Path, discovery: str) -> tuple[InstanceOptions, InstanceOptions]:
    paged = CUDA | {"page": 32, "order": Order.HND}
    fields = {"transport": "nixl"}
    return (
        options_for("prefill", folder, discovery, ONE, engine=CUDA, **fields),
        options_for("decode", folder, discovery, ONE, engine=paged, **fields),
    )


async def tokens(caller: Caller, pair: list[Worker]) -> list[list[int]]:
    """One by one, so that a chunk ends with a page and no other is on its way in that page."""
    replies = [
        await all_at_once(caller, pair, [prompt], room) for room, prompt in enumerate(PROMPTS)
    ]
    return [reply.tokens for (reply,) in replies]


class Late(PrefillExtension):
    """A rank whose GPU has computed each chunk, or each layer, a while after it was given it."""

    def start(self, cache: RankCache) -> None:
        self._cache = cache
        super().start(cache)

    def computed(self, plan: StepPlan, layer: int) -> None:
        if self.options.layers != "all":
            self._delay(plan, [layer])
        super().computed(plan, layer)

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        if self.options.layers == "all":
            self._delay(plan, list(range(self.tuner.first, self.tuner.end)))
        return super().after(plan, samples)

    def _delay(self, plan: StepPlan, layers: list[int]) -> None:
        entries = [entry for work in plan.works for entry in self._entries(work, layers)]
        saved = [tensor[where] for tensor, where in entries]
        for tensor, where in entries:
            tensor[where] = 0
        if entries:
            torch.cuda._sleep(A_WHILE)
        for (tensor, where), value in zip(entries, saved, strict=True):
            tensor[where] = value

    def _entries(
        self, work: RequestWork, layers: list[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pages of a chunk."""
        cache = self._cache
        pages = self._pages(work, work.first, work.end)
        where = torch.tensor(pages, device=cache.memory.device)
        return [(cache.layer(KV, tensor, layer), where) for layer, tensor in product(layers, "kv")]


class Hasty(Late):
    """And one that pushes what is not computed yet."""

    def _push(
        self,
        room: Outgoing,
        work: RequestWork,
        event: Waitable | None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        super()._push(room, work, None, layers)


@needs_nixl
@pytest.mark.parametrize("layers", ["all", 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_push_waits_for_the_gpu(
    folders: dict[TinyKind, Path],
    discovery: str,
    neighbour: Neighbour,
    alone: Alone,
    kind: TinyKind,
    layers: Layers,
) -> None:
    assert carried_by(Late, folders[kind], discovery, neighbour, layers) == alone(kind, PROMPTS)


@needs_nixl
@pytest.mark.parametrize("layers", ["all", 1])
def test_a_push_that_does_not_wait_sends_the_wrong_bytes(
    folders: dict[TinyKind, Path],
    discovery: str,
    neighbour: Neighbour,
    alone: Alone,
    layers: Layers,
) -> None:
    """The negative control."""
    answers = carried_by(Hasty, folders[TinyKind.LLAMA], discovery, neighbour, layers)
    assert answers != alone(TinyKind.LLAMA, PROMPTS)


def carried_by(
    kind: type[PrefillExtension],
    folder: Path,
    discovery: str,
    neighbour: Neighbour,
    layers: Layers,
) -> list[list[int]]:
    """Prompts computed on this process's GPU and answered by another process on the same."""
    prefill, decode = sides(folder, discovery)
    prefill = replace(prefill, layers=layers)
    with (
        hosted(prefill, extend=partial(kind, prefill)) as (here,),
        neighbour.runs(decode) as there,
    ):
        answers: list[list[int]] = call(partial(tokens, pair=[here, there]))
    return answers
