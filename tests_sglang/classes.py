"""SGLang's own backend classes without a server, for its known failures.

Prefill and decode managers in one process over pools in host memory, made as schedulers make them,
one request after another to each decode. Prints a line of JSON for each: how it ended at the
receiver and at the senders, and how many entries are wrong. With ``--aborts`` so many requests are
given up in mid-transfer before each. ``test_6_failures.py`` runs it with stock SGLang 0.5.23's NIXL
and with kvferry.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvferry.testing.ports import later_port

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import numpy as np
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, MetadataBuffers
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_parallel, get_serving, publish
from sglang.srt.server_args import ServerArgs

LAYERS, DIM, PAGE, SLOTS, TOKENS = 2, 64, 4, 64, 8
ENDS = (KVPoll.Success, KVPoll.Failed)
STATES = (
    *("types", "data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "slice_outer_counts"),
    *("layer_ids", "conv_shard_groups"),
)


class Rank(NamedTuple):
    """One scheduler's manager, pools and metadata."""

    manager: Any
    pools: list[torch.Tensor]
    rows: Any


class Room(NamedTuple):
    """A request on its way."""

    receiver: Any
    senders: list[Any]

    @property
    def ends(self) -> dict[str, Any]:
        return {"receiver": name_of(self.receiver), "senders": [*map(name_of, self.senders)]}


def name_of(end: Any) -> str:
    names = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}
    return str(names[int(end.poll())])


class Backend:
    """One backend's classes, and the prefill server that they make up."""

    def __init__(self, name: str, heads: int, model: Path) -> None:
        load_plugins()
        kind = utils.TransferBackend(name)
        self._class = {each: utils.get_kv_class(kind, each) for each in KVClassType}
        self.heads, self.port = heads, later_port()
        self.address = f"127.0.0.1:{self.port}"
        self._args = ServerArgs(
            model_path=str(model),
            **{"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "grammar_backend": "none"},
            **{"attention_backend": "torch_native", "sampling_backend": "pytorch"},
            **{"disaggregation_mode": "prefill", "disaggregation_transfer_backend": name},
            disable_cuda_graph=True,
            skip_tokenizer_init=True,
            disaggregation_bootstrap_port=self.port,
        )
        self._args.resolve_once()
        publish(self._args, role="scheduler", ranks=SpawnRanks(world_rank=0))
        self._class[KVClassType.BOOTSTRAP_SERVER]("127.0.0.1", self.port)

    def rank(self, mode: DisaggregationMode, rank: int, tp: int) -> Rank:
        args, pools, rows = kv_args(rank, tp, self.heads)
        return Rank(self.manager(args, mode, rank, tp), pools, rows)

    def manager(
        self, args: Any, mode: DisaggregationMode, rank: int, tp: int, *, is_mla: bool = False
    ) -> Any:
        # A server of its own: it is known by its port.
        with as_rank(rank, tp), get_serving().override(port=later_port()):
            return self._class[KVClassType.MANAGER](args, mode, self._args, is_mla)

    def kind(self, part: KVClassType) -> Any:
        return self._class[part]

    def begin(self, prefill: list[Rank], decode: Rank, number: int) -> Room:
        """As far as prefill's forward pass."""
        wait_for(lambda: decode.manager.try_ensure_parallel_info(self.address))
        receiver = self._class[KVClassType.RECEIVER](decode.manager, self.address, number)
        receiver.init(0)
        tell(receiver)
        senders = []
        for rank, one in enumerate(prefill):
            with as_rank(rank, len(prefill)):
                senders.append(self._class[KVClassType.SENDER](one.manager, self.address, number))
                tell(senders[-1])
        receiver.send_metadata(np.array([3, 4], np.int32), 0, [])
        wait_for(lambda: all(sender.poll() != KVPoll.Bootstrapping for sender in senders))
        return Room(receiver, senders)


def tell(end: Any) -> None:
    """What kvferry's hook tells of a request; stock SGLang has no such hook."""
    if hasattr(end, "bind_request"):
        none = dict.fromkeys(("lora_id", "cache_salt", "extra_key", "multimodal_inputs"))
        end.bind_request(SimpleNamespace(origin_input_ids=list(range(TOKENS)), **none))


def kv_args(rank: int, tp: int, heads: int) -> tuple[Any, list[torch.Tensor], Any]:
    """As a scheduler would fill them in, but for the memory's kind, which it takes for a GPU's."""
    args = KVArgs()
    share = max(1, heads // tp)
    pools = [torch.zeros(SLOTS, share, DIM) for _ in range(2 * LAYERS)]
    rows = MetadataBuffers(4, 16, torch.float32, 16)
    vars(args).update(
        {f"state_{name}": [] for name in STATES},
        **{"engine_rank": rank, "pp_rank": 0, "system_dp_rank": 0, "rust_http_port": None},
        **{"kv_cache_dtype_str": "float32", "kv_layout": None, "kv_layer_ids": []},
        **{"prefill_start_layer": 0, "prefill_end_layer": LAYERS, "num_draft_entries": 0},
        **{"kv_head_num": share, "total_kv_head_num": heads, "page_size": PAGE, "gpu_id": 0},
        **{"ib_device": None, "is_hybrid_mla_backend": False, "swa_kv_cache_layout": None},
        mla_compression_ratios=None,
        kv_data_ptrs=[pool.data_ptr() for pool in pools],
        kv_data_lens=[pool.nbytes for pool in pools],
        kv_item_lens=[pool[:PAGE].nbytes for pool in pools],
        kv_data_mem_kinds=["DRAM"] * len(pools),
    )
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = rows.get_buf_infos()
    return args, pools, rows


def as_rank(rank: int, tp: int) -> Any:
    """SGLang asks the process which rank it is."""
    ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_tp_rank"), rank)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp)
    group = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    return get_parallel().override(**ranks, **sizes, pp_group=group)


def fill(ranks: list[Rank], heads: int, room: int) -> None:
    """Every entry says of which request, buffer, token and head it is; of padding, of none."""
    share = max(1, heads // len(ranks))
    for rank, (_, pools, rows) in enumerate(ranks):
        for buffer, pool in enumerate(pools):
            for token in range(TOKENS):
                for place, head in enumerate(range(rank * share, (rank + 1) * share)):
                    value = entry(room, buffer, token, head) if head < heads else -1
                    pool[PAGE + token, place] = value
        rows.bootstrap_room[1, 0] = room


def entry(room: int, buffer: int, token: int, head: int) -> float:
    return room % 100 / 8 + 1000 * buffer + 10 * token + head


def wrong(rank: Rank, heads: int, room: int) -> int:
    return sum(
        not bool((pool[3 * PAGE + token, head] == entry(room, buffer, token, head)).all())
        for buffer, pool in enumerate(rank.pools)
        for token in range(TOKENS)
        for head in range(heads)
    )


def wait_for(happens: Any, patience_s: float | None = None) -> None:
    """Or for as long as we are told to; what has not happened then is shown."""
    end = time.monotonic() + (asked.patience_s if patience_s is None else patience_s)
    while not happens() and time.monotonic() < end:
        time.sleep(0.01)


def send(room: Room, prefill: list[Rank], pages: list[int], state: Any) -> None:
    """The next pages, from every rank that waits for them."""
    for rank, sender in enumerate(room.senders):
        with as_rank(rank, len(prefill)):
            sender.send(np.array(pages, np.int32), state)


def carry(backend: Backend, prefill: list[Rank], decode: Rank, number: int, state: Any) -> Room:
    """One request, as schedulers would send it."""
    fill(prefill, backend.heads, number)
    room = backend.begin(prefill, decode, number)
    for sender in room.senders:
        sender.init(2, 1)
    send(room, prefill, [1, 2], state)
    wait_for(lambda: room.receiver.poll() in ENDS)
    wait_for(lambda: all(sender.poll() in ENDS for sender in room.senders))
    return room


def give_up(backend: Backend, prefill: list[Rank], decode: Rank, number: int) -> Room:
    """The same, but decode gives up when half of it was sent."""
    room = backend.begin(prefill, decode, number)
    for sender in room.senders:
        sender.init(2, 1)
    send(room, prefill, [1], None)
    room.receiver.abort()
    wait_for(lambda: all(end.poll() == KVPoll.Failed for end in (room.receiver, *room.senders)))
    return room


def tell_all(model: Path) -> None:
    backend = Backend(asked.backend, asked.heads, model)
    prefill = [
        backend.rank(DisaggregationMode.PREFILL, rank, asked.prefill_tp)
        for rank in range(asked.prefill_tp)
    ]
    state: Any = None if asked.none else []
    for place in range(asked.decodes):
        decode = backend.rank(DisaggregationMode.DECODE, 0, 1)
        for number in range(asked.aborts):
            said(give_up(backend, prefill, decode, 1000 + 100 * place + number).ends)
        room = carry(backend, prefill, decode, 101 + place, state)
        of = 2 * LAYERS * TOKENS * asked.heads
        said({**room.ends, "wrong": wrong(decode, asked.heads, 101 + place), "of": of})


def said(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def config_of(folder: Path, heads: int) -> Path:
    """A model with just those heads; it has no weights, and nobody computes with it."""
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64},
        **{"hidden_size": 8 * DIM, "intermediate_size": DIM, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": DIM},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["nixl", "kvferry"])
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2, help="KV heads")
    parser.add_argument("--decodes", type=int, default=1)
    parser.add_argument("--aborts", type=int, default=0, help="requests given up before each")
    parser.add_argument("--none", action="store_true", help="no state is None, not an empty list")
    parser.add_argument("--patience-s", type=float, default=30.0, help="with each step")
    return parser.parse_args()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            tell_all(config_of(Path(folder), asked.heads))
        except (RuntimeError, ValueError) as error:
            said({"error": str(error)})
    # Its threads would go on for ever.
    os._exit(0)


if __name__ == "__main__":
    asked = arguments()
    main()
