"""SGLang's own NIXL manager and kvferry's, in turns, with pages in host memory and no server.

Run it with the Python of an environment that ``scripts/sglang-env`` made:

    FOLDER/bin/python benchmarks/sglang_managers.py
    FOLDER/bin/python benchmarks/sglang_managers.py --order contiguous --rounds 3

Prefill and decode at TP1 are a process each, with the classes that a scheduler uses. A time is from
``send`` of all pages to the moment when the receiver's ``poll`` says Success; both sides poll every
``POLL_S``. Every round starts new processes for each backend. Bytes are compared after the first
and the last request. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests_sglang"
POLL_S = 50e-6
TIMEOUT_S = 60.0
BACKENDS = ("nixl", "kvferry")


class Shape(NamedTuple):
    """The pools, and how many pages of them a request has."""

    layers: int
    heads: int
    dim: int
    page: int
    tokens: int
    order: str

    @property
    def pages(self) -> int:
        return self.tokens // self.page

    @property
    def num_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.dim * self.tokens * 2

    def chosen(self, seed: int) -> Any:
        """Return the pages of a request, from pools of twice as many."""
        import numpy as np  # noqa: PLC0415 - the parent process needs no packages

        if self.order == "contiguous":
            return np.arange(1, 1 + self.pages, dtype=np.int32)
        order = np.random.default_rng(seed).permutation(2 * self.pages)
        return order[: self.pages].astype(np.int32)


# ---------------------------------------------------------------- the two schedulers


class Side:
    """A scheduler with one request at a time."""

    def __init__(self, role: str, backend_name: str, shape: Shape, folder: Path) -> None:
        sys.path.insert(0, str(TESTS))
        import backends  # noqa: PLC0415
        import torch  # noqa: PLC0415
        from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: PLC0415

        backends.LAYERS, backends.DIM, backends.PAGE = shape.layers, shape.dim, shape.page
        backends.TOKENS, backends.SLOTS = shape.tokens, 2 * shape.pages * shape.page
        self._names: Any = backends
        self._shape = shape
        self._decodes = role == "decode"
        self._backend = backends.Backend(backend_name, shape.heads, folder)
        args, self._pools, self._rows = _pools(backends, torch, shape, filled=not self._decodes)
        mode = DisaggregationMode.DECODE if self._decodes else DisaggregationMode.PREFILL
        self._manager = self._backend.manager(args, mode, 0, 1)
        self._end: Any = None
        self.address = self._backend.address

    def open(self, room: int, address: str) -> dict[str, Any]:
        """Do what schedulers do before the forward pass."""
        if self._decodes:
            self._open_receiver(room, address)
        else:
            self._open_sender(room, address)
        return {}

    def _open_receiver(self, room: int, address: str) -> None:
        wait_for(lambda: self._manager.try_ensure_parallel_info(address))
        receiver = self._names.KVClassType.RECEIVER
        self._end = self._backend.kind(receiver)(self._manager, address, room)
        self._end.init(0)
        self._names.bind_request(self._end)
        self._end.send_metadata(self._shape.chosen(2 * room + 1), 0, [])

    def _open_sender(self, room: int, address: str) -> None:
        self._rows.bootstrap_room[1, 0] = room
        with self._names.as_rank(0, 1):
            self._end = self._backend.kind(self._names.KVClassType.SENDER)(
                mgr=self._manager,
                bootstrap_addr=address,
                bootstrap_room=room,
                **self._names.sender_arguments(0),
            )
        self._names.bind_request(self._end)
        wait_for(lambda: self._end.poll() != self._names.KVPoll.Bootstrapping)
        self._end.init(self._shape.pages, 1)

    def carry(self, room: int, _address: str) -> dict[str, Any]:
        """Send the pages, or wait for them; return when that began or ended."""
        at = time.monotonic()
        if self._decodes:
            say({})
        else:
            with self._names.as_rank(0, 1):
                self._end.send(self._shape.chosen(2 * room), [])
        wait_for(lambda: self._end.poll() in self._names.FINAL)
        at = time.monotonic() if self._decodes else at
        return {"at": at, "end": self._names.status_name(self._end)}

    def sums(self, room: int, _address: str) -> dict[str, Any]:
        """Return a digest of the request's pages in each pool."""
        chosen = self._shape.chosen(2 * room + self._decodes)
        return {"sums": [_digest(pool, self._shape, chosen) for pool in self._pools]}


def serve(role: str, backend: str, shape: Shape, folder: Path) -> None:
    """Be a scheduler: take commands from stdin, and answer each with a line of JSON."""
    side = Side(role, backend, shape, folder)
    say({"address": side.address})
    calls = {"open": side.open, "carry": side.carry, "sums": side.sums}
    for line in sys.stdin:
        command, room, address = json.loads(line)
        if command == "end":
            break
        say(calls[command](room, address))
    # SGLang's threads do not end.
    os._exit(0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the transfer does not end"
        time.sleep(POLL_S)


def _pools(backends: Any, torch: Any, shape: Shape, *, filled: bool) -> tuple[Any, list[Any], Any]:
    """Return a scheduler's arguments over pools in bfloat16."""
    args, _, rows = backends.kv_args(0, 1, shape.heads)
    size = 2 * shape.pages * shape.page, shape.heads, shape.dim
    pools = [torch.zeros(size, dtype=torch.int16) for _ in range(2 * shape.layers)]
    for pool in pools:
        # Also decode's, so that no first access to a page of memory is timed.
        pool.random_() if filled else pool.fill_(1)
    args.kv_data_ptrs = [pool.data_ptr() for pool in pools]
    args.kv_data_lens = [pool.nbytes for pool in pools]
    args.kv_item_lens = [pool[: shape.page].nbytes for pool in pools]
    args.kv_cache_dtype_str = "bfloat16"
    return args, pools, rows


def _digest(pool: Any, shape: Shape, chosen: Any) -> str:
    import hashlib  # noqa: PLC0415

    pages = pool.view(2 * shape.pages, -1)[chosen.tolist()]
    return hashlib.blake2b(pages.numpy().tobytes(), digest_size=16).hexdigest()


def say(values: dict[str, Any]) -> None:
    print("> " + json.dumps(values), flush=True)


# ---------------------------------------------------------------- the benchmark


class Scheduler:
    """A process with one manager."""

    def __init__(self, role: str, backend: str, shape: Shape, folder: Path) -> None:
        sys.path.insert(0, str(TESTS))
        from servers import environment  # noqa: PLC0415

        words = [sys.executable, __file__, "--serve", role, backend, json.dumps(shape), str(folder)]
        self._process = subprocess.Popen(
            words,
            env={**environment(1, folder), "KVFERRY_TRANSPORT": "nixl"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{backend}-{role}.log").open("ab"),
            text=True,
        )

    def ask(self, command: str, room: int = 0, address: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, room, address]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                found = json.loads(line[2:])
                assert isinstance(found, dict)
                return found
        raise SystemExit(f"a process ended: {self._process.wait()}; see its log")

    def end(self) -> None:
        self.ask("end")
        self._process.wait(30)


def carry(prefill: Scheduler, decode: Scheduler, room: int, address: str) -> float:
    """Return the seconds of one request."""
    for each in (decode, prefill):
        each.ask("open", room, address)
        each.answer()
    decode.ask("carry", room)
    decode.answer()
    prefill.ask("carry", room)
    ends = decode.answer(), prefill.answer()
    assert {one["end"] for one in ends} == {"Success"}, ends
    return float(ends[0]["at"] - ends[1]["at"])


def compare(prefill: Scheduler, decode: Scheduler, room: int) -> None:
    sums = []
    for each in (prefill, decode):
        each.ask("sums", room)
        sums.append(each.answer())
    assert sums[0] == sums[1], "wrong bytes arrived"


def run(backend: str, shape: Shape, repeats: int, folder: Path) -> list[float]:
    prefill, decode = (Scheduler(role, backend, shape, folder) for role in ("prefill", "decode"))
    address = prefill.answer()["address"]
    decode.answer()
    seconds = []
    for room in range(1, repeats + 3):
        seconds.append(carry(prefill, decode, room, address))
        if room in (1, repeats + 2):
            compare(prefill, decode, room)
    for each in (prefill, decode):
        each.end()
    # The first two connect and measure the link.
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 16, "heads": 8, "dim": 128, "page": 16, "tokens": 4096}
    for name, default in (*sizes.items(), ("rounds", 2), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--order", choices=("fragmented", "contiguous"), default="fragmented")
    args = parser.parse_args()
    shape = Shape(args.layers, args.heads, args.dim, args.page, args.tokens, args.order)
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64},
            **{"hidden_size": args.heads * args.dim, "intermediate_size": 64},
            **{"num_hidden_layers": args.layers, "num_attention_heads": args.heads},
            **{"num_key_value_heads": args.heads, "head_dim": args.dim},
        }
        (folder / "config.json").write_text(json.dumps(config))
        for number in range(args.rounds):
            for backend in BACKENDS:
                found = [1e3 * s for s in run(backend, shape, args.repeats, folder)]
                times[backend] += found
                print(f"round {number} {backend}: {[round(ms, 1) for ms in found]}", flush=True)
    medians = {f"{name}_ms": round(statistics.median(ms), 2) for name, ms in times.items()}
    least = {f"{name}_least_ms": round(min(ms), 2) for name, ms in times.items()}
    print(json.dumps({"mb": shape.num_bytes / 1e6, "order": shape.order, **medians, **least}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        role, backend, fields, folder = sys.argv[2:]
        serve(role, backend, Shape(*json.loads(fields)), Path(folder))
    main()
