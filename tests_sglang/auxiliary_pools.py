"""SGLang's auxiliary pools (index keys, scales, drafts), without a server.

Transfers requests in two chunks, with pools and arguments as schedulers make them: ``index`` keys
beside a latent, with a draft's (TP2 to TP1; SGLang has pages of 64 only, and one layer without
keys), block ``scales`` of K and V (TP2 with pages of 1 to TP1 with pages of 4), and a ``draft``
model's cache with other heads (the same, and from two pipeline ``stages``). Prints a line of JSON
for each request: final statuses, number of wrong rows, and number of other rows with data. The last
line has the messages that refuse other configurations. ``test_7_auxiliary_pools.py`` runs it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import backends
import torch
from pooled import PooledRank, transfer
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolMXFP8,
)
from sglang.srt.runtime_context import get_spec

from kvferry import InputError
from kvferry.connectors.sglang.unsupported import check_supported

LAYERS, HEADS, DRAFT_HEADS = 3, 4, 2
# Number of a tensor whose rows no one may send.
UNUSED = 90
# The second layer reuses the indices of the first.
SHARED = [False, True, False]
DSA_PAGE = 64
SPARSE = {
    **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    **{"kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
    **{"v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1},
    **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "index_topk": 64},
    **{"index_head_dim": 128, "index_n_heads": 4, "num_nextn_predict_layers": 1},
}


class Rows(NamedTuple):
    """Rows of one tensor (pages, tokens, units, bytes), and the units of the model in them."""

    bytes: torch.Tensor
    units: range


class Form(NamedTuple):
    """A model's pools on one rank: its own, the draft's, and the rows in them.

    ``numbers`` identify the tensors of ``rows`` if this stage has not all of them.
    """

    pool: Any
    draft: Any
    rows: list[Rows]
    numbers: tuple[int, ...] | None = None


def paged(buffer: torch.Tensor, page: int, units: range) -> Rows:
    """Return the rows of a tensor of token rows."""
    flat = buffer.view(torch.uint8).flatten(1)
    return Rows(flat.view(-1, page, len(units), flat.shape[1] // len(units)), units)


def size(page: int) -> int:
    """Return the tokens in a pool without its unused page; enough for the longest request."""
    return 8 * max(page, 8) - page


def share(heads: int, rank: int, tp: int) -> range:
    return range(rank * heads // tp, (rank + 1) * heads // tp)


def index(rank: int, tp: int, page: int) -> Form:
    """Sparse attention with a layer for multi-token prediction; every rank has all keys."""
    whole, rows = range(1), []
    pools = [
        DSATokenToKVPool(
            size(page),
            **{"page_size": page, "kv_lora_rank": 512, "dtype": torch.bfloat16, "device": "cpu"},
            **{"qk_rope_head_dim": 64, "layer_num": len(skips), "index_head_dim": 128},
            **{"enable_memory_saver": False, "kv_cache_dim": 576, "skip_topk_layers": skips},
        )
        for skips in (SHARED, [False])
    ]
    for pool in pools:
        rows += [paged(buffer, page, whole) for buffer in pool.kv_buffer]
        for buffer in pool.index_k_with_scale_buffer:
            if len(buffer):
                keys, scales = buffer.split([page * 128, page * 4], 1)
                rows += [Rows(keys.unflatten(1, (page, 1, 128)), whole)]
                rows += [Rows(scales.unflatten(1, (page, 1, 4)), whole)]
    return Form(pools[0], pools[1], rows)


def scales(rank: int, tp: int, page: int) -> Form:
    heads = share(HEADS, rank, tp)
    pool = MHATokenToKVPoolMXFP8(
        *(size(page), page, torch.float8_e4m3fn, len(heads), backends.DIM, LAYERS),
        *("cpu", False),
    )
    buffers = [*pool.k_buffer, *pool.v_buffer, *pool.k_scale_buffer, *pool.v_scale_buffer]
    return Form(pool, None, [paged(buffer, page, heads) for buffer in buffers])


def draft(rank: int, tp: int, page: int, stages: tuple[int, int] = (0, 1)) -> Form:
    """A draft model, for which every stage has memory and which the last stage computes."""
    pools, rows = [], []
    mine = range(*get_pp_indices(LAYERS, *stages))
    for heads, layers in ((HEADS, len(mine)), (DRAFT_HEADS, 1)):
        own = share(heads, rank, tp)
        pool = MHATokenToKVPool(
            *(size(page), page, torch.float32, len(own), backends.DIM, layers),
            *("cpu", False),
        )
        rows += [paged(buffer, page, own) for buffer in (*pool.k_buffer, *pool.v_buffer)]
        pools.append(pool)
    of_draft = 2 * LAYERS if stages[0] == stages[1] - 1 else UNUSED
    numbers = (*mine, *(LAYERS + layer for layer in mine), of_draft, of_draft + 1)
    return Form(pools[0], pools[1], rows, numbers)


FORMS: dict[str, Callable[..., Form]] = {
    "index": index,
    "scales": scales,
    "draft": draft,
    "stages": draft,
}
# Of one chunk and of two, which fill their last page or not.
LENGTHS = dict.fromkeys(FORMS, (1, 7, 22, 24)) | {"index": (40, 64, 150, 200)}
DTYPES = {"index": "bfloat16", "scales": "mxfp8", "draft": "float32", "stages": "float32"}


def arguments(name: str, form: Form, rank: int, tp: int, page: int) -> tuple[KVArgs, Any]:
    """Return a scheduler's arguments; the draft's buffers follow the model's."""
    args, _, rows = backends.kv_args(rank, tp, HEADS)
    infos = [list(part) for part in form.pool.get_contiguous_buf_infos()]
    args.num_draft_entries = 0
    if form.draft is not None:
        added = form.draft.get_contiguous_buf_infos()
        args.num_draft_entries = len(added[0])
        infos = [part + list(more) for part, more in zip(infos, added, strict=True)]
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = infos
    args.page_size, args.prefill_end_layer = page, LAYERS
    args.kv_cache_dtype_str = DTYPES[name]
    utils.setup_state_kv_args(args, form.pool, form.draft, total_kv_layers=LAYERS)
    return args, rows


class AuxiliaryRank(PooledRank):
    """One scheduler's pools, and the manager for them."""

    def __init__(
        self,
        backend: backends.Backend,
        name: str,
        mode: Any,
        rank: int,
        tp: int,
        stages: tuple[int, int] = (0, 1),
    ) -> None:
        is_prefill = mode == DisaggregationMode.PREFILL
        self.page = DSA_PAGE if name == "index" else 1 if is_prefill else 4
        staged = (stages,) if stages != (0, 1) else ()
        with backends.as_rank(rank, tp, *stages):
            self.form = FORMS[name](rank, tp, self.page, *staged)
        args, self.rows = arguments(name, self.form, rank, tp, self.page)
        is_mla = name == "index"
        self.manager = backend.manager(args, mode, rank, tp, stages=stages, is_mla=is_mla)
        self.num_tokens, self.pages = 0, [0]

    def allocate(self, num_tokens: int, *, computes: bool) -> list[int]:
        """Allocate pages, in opposite orders on the two sides; page 0 is unused."""
        all_pages = range(1, len(self.form.rows[0].bytes))
        in_order = all_pages if computes else all_pages[::-1]
        self.num_tokens = num_tokens
        self.pages = list(in_order[: -(-num_tokens // self.page)])
        return self.pages

    def state(self) -> list[Any]:
        """Return the same pages again, as SGLang does."""
        return [self.pages for _ in self.manager.kv_args.state_types]

    def entries(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each row of the request with its expected bytes."""
        numbers = self.form.numbers or range(len(self.form.rows))
        for number, rows in zip(numbers, self.form.rows, strict=True):
            for token in range(self.num_tokens):
                page, place = self.pages[token // self.page], token % self.page
                for local, unit in enumerate(rows.units):
                    row = rows.bytes[page, place, local]
                    yield row, entry(number, token, unit, len(row))

    def fill(self) -> None:
        for row, expected in self.entries():
            row.copy_(expected)

    def free_between_chunks(self) -> None:
        """Do nothing: SGLang frees none of these pages."""

    def count_wrong(self) -> int:
        return sum(not bool((row == expected).all()) for row, expected in self.entries())

    def count_touched(self) -> int:
        """Empty the request's rows, and count the rows that still have data."""
        for row, _ in self.entries():
            row.zero_()
        return sum(int(rows.bytes.any(-1).sum()) for rows in self.form.rows)

    def clear(self) -> None:
        for rows in self.form.rows:
            rows.bytes.zero_()


def entry(tensor: int, token: int, unit: int, width: int) -> torch.Tensor:
    """Return bytes that identify tensor, token and unit; none is 0."""
    first = 31 * tensor + 7 * token + 3 * unit
    return ((torch.arange(width) + first) % 251 + 1).to(torch.uint8)


def refusals() -> dict[str, str]:
    """Return the messages that refuse other configurations of SGLang."""
    usual: dict[str, Any] = {"num_draft_entries": 0, "kv_layer_ids": [], "page_size": 64}
    usual |= {"kv_cache_dtype_str": "auto", "state_types": [], "mla_compression_ratios": None}
    swa, scale, tail = StateType.SWA, StateType.BLOCK_SCALE, StateType.DSA_TAIL
    messages = {}
    others: dict[str, dict[str, Any]] = {
        "several kinds": {"state_types": [StateType.DSA, tail]},
        "four bits": {"kv_cache_dtype_str": "nvfp4"},
        "shuffled scales": {"state_types": [scale], "page_size": 128},
        "compressed latent": {"mla_compression_ratios": [4, 128]},
        "draft and windows": {"state_types": [swa], "num_draft_entries": 2},
    }
    for name, args in others.items():
        try:
            check_supported(SimpleNamespace(**{**usual, **args}), is_mla=False)
        except InputError as error:
            messages[name] = str(error)
    return messages


def configure(model: Path) -> None:
    """Write the configurations of the model and of drafts with one layer.

    The model itself has plain attention, because SGLang's sparse attention needs a GPU.
    """
    config = json.loads((backends.write_config(model, HEADS) / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS}
    (model / "config.json").write_text(json.dumps(config))
    config |= {"num_hidden_layers": 1, "num_key_value_heads": DRAFT_HEADS}
    for name in FORMS:
        (model / name).mkdir()
        text = json.dumps(config | (SPARSE if name == "index" else {}))
        (model / name / "config.json").write_text(text)


def transfer_all(model: Path, name: str) -> None:
    """Transfer requests of all lengths between pools of one form."""
    backend = backends.Backend("kvferry", HEADS, model)
    with get_spec().override(speculative_draft_model_path=str(model / name)):
        prefill, decode = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
        if name == "stages":
            stages = (0, 2), (1, 2)
            sources = [AuxiliaryRank(backend, name, prefill, 0, 1, each) for each in stages]
        else:
            sources = [AuxiliaryRank(backend, name, prefill, rank, 2) for rank in range(2)]
        target = AuxiliaryRank(backend, name, decode, 0, 1)
    for num_tokens in LENGTHS[name]:
        result = {"form": name, **transfer(backend, sources, target, num_tokens)}
        result |= {"tokens": num_tokens, "wrong": target.count_wrong()}
        backends.print_json(result | {"touched": target.count_touched()})
        for rank in (*sources, target):
            rank.clear()


def main(model: Path) -> None:
    configure(model)
    for name in FORMS:
        transfer_all(model, name)
    backends.print_json(refusals())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
    # SGLang's threads do not end.
    os._exit(0)
