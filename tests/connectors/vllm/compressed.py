"""Cache groups and tensors of DeepSeek V4, as recorded from vLLM's own functions.

``tests_vllm/test_compressed_groups.py`` computes the same with the installed engine, compares it
with the record, and writes it if it is missing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from connectors.slot_mappings import SlotCase
from numpy.typing import NDArray

from kvferry.connectors.vllm.caches import EngineShape
from kvferry.connectors.vllm.engine import block_groups, block_selector
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.worker import ConnectorWorker

FOLDER = Path(__file__).parent / "groups"
NUM_BLOCKS = 400
# Tokens of an entry in each layer; 0 without compressed attention.
RATIOS = (0, 4, 128, 4)
# No multiple of a ratio or of a block.
NUM_TOKENS = 333
UNTOUCHED = 0xA5
# The fields of a ``VllmConfig`` that ``block_groups`` and ``block_selector`` read.
CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    speculative_config=None,
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    cache_config=SimpleNamespace(block_size=4),
)


class CompressedCase(NamedTuple):
    """An engine with ``--kv-cache-dtype`` and ``--block-size``."""

    kept_as: str
    block: int

    def __str__(self) -> str:
        return f"{self.kept_as}-block{self.block}"

    @property
    def path(self) -> Path:
        """The file of the record."""
        return FOLDER / f"{self}.json"

    def recorded(self) -> dict[str, Any]:
        """Return the groups, the place of each cache and the size of the memory."""
        found = json.loads(self.path.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found


ENGINES = tuple(
    CompressedCase(kept_as, block) for kept_as in ("fp8_ds_mla", "auto") for block in (256, 128)
)


class Place(NamedTuple):
    """Bytes of an entry in an engine's memory."""

    first: int
    num_bytes: int


class CompressedEngine:
    """One rank's memory with the caches that vLLM makes, and a request's blocks in each group."""

    def __init__(self, case: CompressedCase, seed: int) -> None:
        self.packed = case.kept_as == "fp8_ds_mla"
        record = case.recorded()
        self.cache_of: dict[str, Any] = record["caches"]
        specs = [made(group["spec"]) for group in record["groups"]]
        self.names: list[list[str]] = [group["names"] for group in record["groups"]]
        self.groups = block_groups(CONFIG, SimpleNamespace(kv_cache_groups=[
            SimpleNamespace(layer_names=names, kv_cache_spec=spec)
            for names, spec in zip(self.names, specs, strict=True)
        ]))  # fmt: skip
        self.selector = block_selector(CONFIG, self.groups)
        self.spec_of = {
            name: getattr(spec, "kv_cache_specs", {}).get(name, spec)
            for names, spec in zip(self.names, specs, strict=True)
            for name in names
        }
        self.memory = torch.full((record["num_bytes"],), UNTOUCHED, dtype=torch.uint8)
        # Groups share the memory, so that a block belongs to one group at a time.
        free = iter(np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)).tolist())
        self.blocks = [
            [next(free) for _ in range(-(-NUM_TOKENS // spec.block_size))] for spec in specs
        ]

    def views(self) -> dict[str, torch.Tensor]:
        """Return the caches as vLLM registers them."""
        found = {}
        for name, at in self.cache_of.items():
            dtype = getattr(torch, at["dtype"])
            strides = [stride // dtype.itemsize for stride in at["strides"]]
            typed = self.memory.view(dtype)
            found[name] = typed.as_strided(at["shape"], strides, at["offset"] // dtype.itemsize)
        return found

    def start(
        self, undo: ExitStack, url: str, name: str, rank: int, *, tp: int, sends: bool
    ) -> Any:
        """Return a connector worker over the caches."""
        settings = read_settings({"discovery": url, "instance": name, "transport": "shm"})
        worker = ConnectorWorker(settings, None, name, "m")
        worker.register(
            self.views(),
            EngineShape(tp, (len(RATIOS),), rank, 1, 4, on_cpu=False),
            self.groups,
            sends=sends,
            receives=not sends,
            fails_early=False,
            zeroes_rest=True,
        )
        undo.callback(worker.close)
        return worker

    def write(self, memory: NDArray[np.uint8], first: int, end: int, *, kept: bool) -> None:
        """Write the entries of some tokens where vLLM's slot mappings and kernels put them.

        ``kept``: only of tokens that a decode of the whole prompt still reads.
        """
        for place, names in enumerate(self.names):
            for name in names:
                window = self.groups[place].window if kept else None
                start = first if window is None else max(first, NUM_TOKENS - window)
                for token, at in self.entries(place, name):
                    if start <= token < end:
                        for part in self.parts(name, *at):
                            span = slice(part.first, part.first + part.num_bytes)
                            memory[span] = content(name, token, part)

    def entries(self, place: int, name: str) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield each token that has an entry in a cache, with the block and the place in it."""
        spec = self.spec_of[name]
        case = SlotCase("vllm", 1, 1, spec.block_size, spec.tokens_per_state)
        index = {int(block): number for number, block in enumerate(case.blocks)}
        slots = case.recorded()[0][:NUM_TOKENS]
        for token in np.flatnonzero(slots >= 0).tolist():
            block, within = divmod(int(slots[token]), spec.block_size // spec.tokens_per_state)
            yield token, (self.blocks[place][index[block]], within)

    def parts(self, name: str, block: int, within: int) -> list[Place]:
        """Return the places of an entry: packed latents and keys have their scales apart."""
        at = self.cache_of[name]
        _, _, entries, width = at["shape"]
        width *= getattr(torch, at["dtype"]).itemsize
        widths = [width]
        if name.endswith(".indexer.k_cache"):
            widths = [128, 4]
        elif self.packed and width == 584:
            widths = [576, 8]
        page, found = at["offset"] + block * at["strides"][0], []
        for part in widths:
            found.append(Place(page + within * part, part))
            page += entries * part
        return found

    def zero_rests(self, memory: NDArray[np.uint8]) -> None:
        """Zero the entries of the last blocks that the prompt does not reach."""
        for place, names in enumerate(self.names):
            for name in names:
                spec = self.spec_of[name]
                before = (NUM_TOKENS - 1) // spec.block_size * spec.block_size
                used = (NUM_TOKENS // spec.tokens_per_state) - before // spec.tokens_per_state
                for within in range(used, spec.block_size // spec.tokens_per_state):
                    for part in self.parts(name, self.blocks[place][-1], within):
                        memory[part.first : part.first + part.num_bytes] = 0


def made(spec: dict[str, Any]) -> Any:
    """Return an object with the fields of vLLM's specification, and a class of its name."""
    fields = {name: value for name, value in spec.items() if name != "kind"}
    if "kv_cache_specs" in fields:
        fields["kv_cache_specs"] = {n: made(s) for n, s in fields["kv_cache_specs"].items()}
    return type(spec["kind"], (SimpleNamespace,), {})(**fields)


def content(name: str, token: int, part: Place) -> NDArray[np.uint8]:
    """Return the bytes of a part of an entry, which differ by cache, token and part."""
    start = zlib.crc32(f"{name}/{token}/{part.num_bytes}".encode())
    return ((np.arange(part.num_bytes) * 7 + start) % 251).astype(np.uint8)


def decode(
    pipe: Connection, case: CompressedCase, url: str, rank: int, tp: int, order: Any
) -> None:
    """Receive one prompt in a process of its own, and send what is wrong with the memory."""
    with ExitStack() as undo:
        engine = CompressedEngine(case, seed=2)
        worker = engine.start(undo, url, "decode-0", rank, tp=tp, sends=False)
        worker.start_receives(order)
        pipe.send("started")
        arrived = worker.take_arrivals()
        while not arrived.received:
            arrived = worker.take_arrivals(wait_s=1.0)
        expected = np.full(len(engine.memory), UNTOUCHED, np.uint8)
        engine.zero_rests(expected)
        engine.write(expected, order.received[0].prefix, NUM_TOKENS, kept=True)
        wrong = np.flatnonzero(engine.memory.numpy() != expected)
        pipe.send((sorted(arrived.failed), len(wrong), wrong[:5].tolist()))
