"""SGLang's and kvferry's backend classes in one process, without a server.

Makes prefill and decode managers over pools in host memory, as schedulers do, and transfers one
request after another to each decode. Prints a line of JSON for each: status of the receiver and of
the senders, and the number of wrong entries. ``--aborts``: how many requests to abort before each
during their transfer. ``test_6_failures.py`` runs it with SGLang's NIXL backend and with kvferry.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvferry.testing.ports import later_port

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import numpy as np
import sglang
import torch
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, MetadataBuffers
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_parallel, get_serving, publish
from sglang.srt.server_args import ServerArgs

LAYERS, DIM, PAGE, SLOTS, TOKENS = 2, 64, 4, 64, 8
FINAL = (KVPoll.Success, KVPoll.Failed)
TIMEOUT_S = 30.0
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
    """The receiver and the senders of a request."""

    receiver: Any
    senders: list[Any]

    @property
    def statuses(self) -> dict[str, Any]:
        return {
            "receiver": status_name(self.receiver),
            "senders": [status_name(sender) for sender in self.senders],
        }


def status_name(end: Any) -> str:
    names = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}
    return str(names[int(end.poll())])


class Backend:
    """The classes of one backend, and the bootstrap server of a prefill server."""

    def __init__(
        self, name: str, heads: int, model: Path, timeout_s: float = TIMEOUT_S, **more: Any
    ) -> None:
        load_plugins()
        kind = utils.TransferBackend(name)
        self._classes = {part: utils.get_kv_class(kind, part) for part in KVClassType}
        self.heads, self.timeout_s, self.port = heads, timeout_s, later_port()
        self.address = f"127.0.0.1:{self.port}"
        self._args = ServerArgs(
            model_path=str(model),
            **{"device": "cpu", "dtype": "float32", "host": "127.0.0.1", "grammar_backend": "none"},
            **{"attention_backend": "torch_native", "sampling_backend": "pytorch"},
            **{"disaggregation_mode": "prefill", "disaggregation_transfer_backend": name},
            disable_cuda_graph=True,
            skip_tokenizer_init=True,
            disaggregation_bootstrap_port=self.port,
            **more,
        )
        self._args.resolve_once()
        publish(self._args, role="scheduler", ranks=SpawnRanks(world_rank=0))
        self._classes[KVClassType.BOOTSTRAP_SERVER]("127.0.0.1", self.port)

    def rank(self, mode: DisaggregationMode, rank: int, tp: int) -> Rank:
        args, pools, rows = kv_args(rank, tp, self.heads)
        return Rank(self.manager(args, mode, rank, tp), pools, rows)

    def manager(
        self,
        args: Any,
        mode: DisaggregationMode,
        rank: int,
        tp: int,
        *,
        stages: tuple[int, int] = (0, 1),
        is_mla: bool = False,
    ) -> Any:
        # Each manager belongs to another server, which its port identifies.
        with as_rank(rank, tp, *stages), get_serving().override(port=later_port()):
            return self._classes[KVClassType.MANAGER](args, mode, self._args, is_mla)

    def kind(self, part: KVClassType) -> Any:
        return self._classes[part]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, self.timeout_s)

    def open_room(self, prefill: list[Rank], decode: Rank, number: int) -> Room:
        """Do what schedulers do before prefill's forward pass."""
        self.wait_for(lambda: decode.manager.try_ensure_parallel_info(self.address))
        receiver = self._classes[KVClassType.RECEIVER](decode.manager, self.address, number)
        receiver.init(0)
        bind_request(receiver)
        senders = []
        for rank, source in enumerate(prefill):
            with as_rank(rank, len(prefill)):
                sender = self._classes[KVClassType.SENDER](
                    mgr=source.manager,
                    bootstrap_addr=self.address,
                    bootstrap_room=number,
                    **sender_arguments(rank),
                )
            bind_request(sender)
            senders.append(sender)
        receiver.send_metadata(np.array([3, 4], np.int32), 0, [])
        self.wait_for(lambda: all(sender.poll() != KVPoll.Bootstrapping for sender in senders))
        return Room(receiver, senders)


def sender_arguments(rank: int) -> dict[str, Any]:
    """Return the arguments that only SGLang 0.5.21 passes to senders."""
    old = sglang.__version__.startswith("0.5.21")
    return {"dest_tp_ranks": [rank], "pp_rank": 0} if old else {}


def bind_request(end: Any) -> None:
    """Do what kvferry's hooks do. SGLang's own backends have no such hook."""
    if hasattr(end, "bind_request"):
        none = dict.fromkeys(("lora_id", "cache_salt", "extra_key", "multimodal_inputs"))
        end.bind_request(SimpleNamespace(origin_input_ids=list(range(TOKENS)), **none))


def kv_args(rank: int, tp: int, heads: int) -> tuple[Any, list[torch.Tensor], Any]:
    """Return a scheduler's arguments, with the kind of memory that the pools really have."""
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


def as_rank(rank: int, tp: int, stage: int = 0, num_stages: int = 1) -> Any:
    """Let SGLang take this process for a rank of a pipeline stage."""
    ranks = dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_tp_rank"), rank)
    sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp)
    group = SimpleNamespace(
        world_size=num_stages,
        rank_in_group=stage,
        is_first_rank=stage == 0,
        is_last_rank=stage == num_stages - 1,
    )
    stages = {"pp_rank": stage, "pp_size": num_stages, "pp_group": group}
    return get_parallel().override(**ranks, **sizes, **stages)


def fill(ranks: list[Rank], heads: int, room: int) -> None:
    """Write a value of its own to each entry of a request, and -1 to padding."""
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


def count_wrong(rank: Rank, heads: int, room: int) -> int:
    return sum(
        not bool((pool[3 * PAGE + token, head] == entry(room, buffer, token, head)).all())
        for buffer, pool in enumerate(rank.pools)
        for token in range(TOKENS)
        for head in range(heads)
    )


def wait_for(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for a condition. After the timeout the caller prints the statuses that it finds."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def send(room: Room, prefill: list[Rank], pages: list[int], state: Any) -> None:
    """Send the next pages from every rank."""
    for rank, sender in enumerate(room.senders):
        with as_rank(rank, len(prefill)):
            sender.send(np.array(pages, np.int32), state)


def transfer(backend: Backend, prefill: list[Rank], decode: Rank, number: int, state: Any) -> Room:
    """Transfer one request, as schedulers do."""
    fill(prefill, backend.heads, number)
    room = backend.open_room(prefill, decode, number)
    for sender in room.senders:
        sender.init(2, 1)
    send(room, prefill, [1, 2], state)
    backend.wait_for(lambda: room.receiver.poll() in FINAL)
    backend.wait_for(lambda: all(sender.poll() in FINAL for sender in room.senders))
    return room


def abort_midway(backend: Backend, prefill: list[Rank], decode: Rank, number: int) -> Room:
    """Abort a request at decode after half of its pages were sent."""
    room = backend.open_room(prefill, decode, number)
    for sender in room.senders:
        sender.init(2, 1)
    send(room, prefill, [1], None)
    room.receiver.abort()
    ends = (room.receiver, *room.senders)
    backend.wait_for(lambda: all(end.poll() == KVPoll.Failed for end in ends))
    return room


def transfer_all(options: argparse.Namespace, model: Path) -> None:
    backend = Backend(options.backend, options.heads, model, options.timeout_s)
    prefill = [
        backend.rank(DisaggregationMode.PREFILL, rank, options.prefill_tp)
        for rank in range(options.prefill_tp)
    ]
    state: Any = None if options.none else []
    for place in range(options.decodes):
        decode = backend.rank(DisaggregationMode.DECODE, 0, 1)
        for number in range(options.aborts):
            room = abort_midway(backend, prefill, decode, 1000 + 100 * place + number)
            print_json(room.statuses)
        room = transfer(backend, prefill, decode, 101 + place, state)
        num_entries = 2 * LAYERS * TOKENS * options.heads
        wrong = count_wrong(decode, options.heads, 101 + place)
        print_json({**room.statuses, "wrong": wrong, "of": num_entries})


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def write_config(folder: Path, heads: int) -> Path:
    """Write the configuration of a model with these heads, without weights."""
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64},
        **{"hidden_size": 8 * DIM, "intermediate_size": DIM, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": DIM},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["nixl", "kvferry"])
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2, help="KV heads")
    parser.add_argument("--decodes", type=int, default=1)
    parser.add_argument("--aborts", type=int, default=0, help="requests to abort before each")
    parser.add_argument("--none", action="store_true", help="pass None for no state, not a list")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of each step")
    parser.add_argument("--version", help="let SGLang report this version")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.version:
        sglang.__version__ = options.version
    with tempfile.TemporaryDirectory() as folder:
        try:
            transfer_all(options, write_config(Path(folder), options.heads))
        except (RuntimeError, ValueError) as error:
            print_json({"error": str(error)})
    # SGLang's threads do not end.
    os._exit(0)


if __name__ == "__main__":
    main()
