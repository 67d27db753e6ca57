"""vLLM servers of a run, and requests to a pair of them."""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gpu_engines.client import Json, metric, post, stream
from gpu_engines.machine import DeviceKind, Machine, shims
from gpu_engines.model import FIRST_WORD, VOCABULARY, ModelSize
from gpu_engines.servers import Server, Spec
from kvferry.testing.ports import later_port

COMPLETIONS = "/v1/completions"
ROOMS_DONE = "vllm:kvferry_rooms_done_total"
# How long a terminated server may finish its requests.
DRAIN_S = 60
# Rooms that tests_vllm/skipping.py does not transfer.
SKIPPED = "skip-"
_GIB = 1 << 30
# Decode steps are captured; nothing is compiled, which takes minutes.
_CAPTURED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
_GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
_WIDE_GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
# Servers for many requests at once; "x2" has two tensor-parallel ranks.
WIDE = ("wide-p", "wide-d", "wide-px2", "nixl-wide-p", "nixl-wide-d", "nixl-wide-px2")
# Fields that vLLM's own proxies send to prefill.
PROXY: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmSide(NamedTuple):
    """One server: ``transfer`` is its ``--kv-transfer-config``.

    A ``wide`` one takes 256 requests at once, and has three times the cache.
    """

    transfer: Json | None = None
    tp: int = 1
    block: int = 16
    dtype: str = "float32"
    batched: int = 8192
    wide: bool = False
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


class VllmScale(NamedTuple):
    """Sizes that depend on the machine. Lengths are one more than a multiple of the block."""

    model: ModelSize
    cache_bytes: int
    max_tokens: int
    chunk: int
    blocks: tuple[int, int, int]
    lengths: tuple[int, ...]
    timed_lengths: tuple[int, ...]
    # Of prompts under load, and the numbers of requests at once.
    loaded_lengths: tuple[int, ...]
    levels: tuple[int, ...]


GPU = VllmScale(
    model=ModelSize(24, 16, 8, 1024, 3072),
    cache_bytes=5 * _GIB,
    max_tokens=16_384,
    chunk=2048,
    blocks=(16, 32, 64),
    lengths=(17, 113, 2001, 8001),
    timed_lengths=(113, 2001, 8001),
    loaded_lengths=(1000, 8000),
    levels=(1, 8, 64, 256),
)
# On a CPU vLLM transfers only between equal blocks.
CPU = VllmScale(
    model=ModelSize(4, 4, 2, 256, 512),
    cache_bytes=_GIB // 8,
    max_tokens=2048,
    chunk=128,
    blocks=(32, 32, 32),
    lengths=(33, 129, 609),
    timed_lengths=(33, 609),
    loaded_lengths=(33, 300),
    levels=(1, 4),
)


def scale_on(device: DeviceKind) -> VllmScale:
    """Return the sizes for a kind of device."""
    return GPU if device is DeviceKind.CUDA else CPU


class VllmServers:
    """Commands of all servers of a run."""

    def __init__(self, machine: Machine) -> None:
        self.scale = scale_on(machine.device)
        self.is_cuda = machine.is_cuda
        self._machine = machine
        self._model = machine.models[self.scale.model]
        self._discovery = later_port()
        self._logging = machine.folder / "logging.json"
        self._logging.write_text(json.dumps(_LOGGING))

    def specs(self) -> dict[str, Spec]:
        """Return how to start each server."""
        small, middle, large = self.scale.blocks
        chunk = self.scale.chunk
        full = "bfloat16"
        get = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
        sides = {
            "alone32": VllmSide(None, 1, small, batched=chunk),
            "p32": VllmSide(
                *(self._kvferry("p32", "kv_producer"), 1, small),
                batched=chunk,
                # Its log lists the tokens of each step.
                flags=("--enable-logging-iteration-details",),
            ),
            "d32": VllmSide(self._kvferry("d32", "kv_consumer"), 1, middle, batched=chunk),
            "p32x2": VllmSide(self._kvferry("p32x2", "kv_producer"), 2, small, batched=chunk),
            "d32x2": VllmSide(self._kvferry("d32x2", "kv_consumer"), 2, large, batched=chunk),
            "drain-p": VllmSide(
                *(self._kvferry("drain-p", "kv_producer"), 1, small),
                batched=chunk,
                flags=("--shutdown-timeout", str(DRAIN_S)),
            ),
            "skipping": VllmSide(
                self._kvferry("skipping", "kv_consumer")
                | {"kv_connector": "SkippingConnector"}
                | {"kv_connector_module_path": "tests_vllm.skipping"},
                *(1, middle),
                batched=chunk,
            ),
            **{
                name: VllmSide(self._beside(offloading, name, role), 1, small)
                for name, offloading, role in (
                    ("multi-p", "OffloadingConnector", "kv_producer"),
                    ("multi-d", "OffloadingConnector", "kv_consumer"),
                    ("simple-p", "SimpleCPUOffloadConnector", "kv_producer"),
                    ("simple-d", "SimpleCPUOffloadConnector", "kv_consumer"),
                )
            },
            "alone16": VllmSide(None, 1, small, full),
            "p16": VllmSide(self._kvferry("p16", "kv_producer"), 1, small, full),
            "d16": VllmSide(self._kvferry("d16", "kv_consumer"), 1, small, full),
            "nixl-p": VllmSide(self._nixl("kv_producer"), 1, small, full, environment=get),
            "nixl-d": VllmSide(self._nixl("kv_consumer"), 1, small, full, environment=get),
            **{name: self._wide(name, get) for name in WIDE},
        }
        specs = {name: self._vllm(name, side) for name, side in sides.items()}
        return {"discovery": self._discovery_spec(), **specs}

    def router(self, prefills: Sequence[Server], decode: Server, first_token: str) -> Spec:
        """Return how to start kvferry's router, with the first token from a side."""
        port = later_port()
        command = [sys.executable, "-m", "kvferry", "serve", "router", "--engine", "vllm"]
        command += ["--port", str(port)]
        command += [f"--prefill-url={each.name}={each.url}" for each in prefills]
        command += [f"--decode-url={decode.name}={decode.url}", "--first-token", first_token]
        name, environment = f"router-{first_token}", self._machine.environment()
        return Spec(name, command, port, environment, "/healthz")

    def _discovery_spec(self) -> Spec:
        command = [sys.executable, "-m", "kvferry", "serve", "discovery"]
        command += ["--port", str(self._discovery)]
        environment = self._machine.environment()
        return Spec("discovery", command, self._discovery, environment, "/healthz")

    def _kvferry(self, name: str, role: str) -> Json:
        extra = {"discovery": f"http://127.0.0.1:{self._discovery}", "instance": name}
        return {
            "kv_connector": "KVFerryConnector",
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }

    def _nixl(self, role: str) -> Json:
        buffers = {} if self._machine.is_cuda else {"kv_buffer_device": "cpu"}
        return {"kv_connector": "NixlConnector", "kv_role": role} | buffers

    def _wide(self, name: str, environment: Mapping[str, str]) -> VllmSide:
        """Return a server for many requests, as its name says."""
        role = "kv_producer" if "-p" in name else "kv_consumer"
        is_nixl = name.startswith("nixl")
        return VllmSide(
            self._nixl(role) if is_nixl else self._kvferry(name, role),
            2 if name.endswith("x2") else 1,
            self.scale.blocks[0],
            "bfloat16",
            wide=True,
            environment=environment if is_nixl else {},
        )

    def _beside(self, connector: str, name: str, role: str) -> Json:
        """Return kvferry in a MultiConnector with a connector that offloads to host memory."""
        offloading = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 2 * _GIB},
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"connectors": [self._kvferry(name, role), offloading]},
        }

    def _vllm(self, name: str, side: VllmSide) -> Spec:
        port, scale = later_port(), self.scale
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self._model)]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", side.dtype, "--tensor-parallel-size", str(side.tp)]
        command += ["--block-size", str(side.block), "--max-model-len", str(scale.max_tokens)]
        cache_bytes = scale.cache_bytes * (3 if side.wide else 1) // side.tp
        command += ["--kv-cache-memory-bytes", str(cache_bytes)]
        command += ["--max-num-seqs", "256" if side.wide else "16"]
        command += ["--max-num-batched-tokens", str(side.batched)]
        command += ["--disable-uvicorn-access-log", "--seed", "0", *side.flags]
        if side.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(side.transfer)]
        environment = {**self._environment(side), **side.environment}
        return Spec(name, command + self._device_flags(side), port, environment)

    def _device_flags(self, side: VllmSide) -> list[str]:
        if not self._machine.is_cuda:
            return ["--enforce-eager"]
        flags = ["--gpu-memory-utilization", "0.06"]
        if side.dtype == "float32":
            flags += ["--enforce-eager", "--attention-backend", "TRITON_ATTN"]
        else:
            flags += ["--attention-backend", "FLASH_ATTN"]
            if side.tp == 1:
                sizes = _WIDE_GRAPHS if side.wide else _GRAPHS
                flags += ["--compilation-config", json.dumps(_CAPTURED | sizes)]
            else:
                # Collectives through the host can't be captured.
                flags += ["--enforce-eager"]
            flags += ["--kernel-config", json.dumps({"enable_jit_warmup": False})]
        if side.tp > 1:
            flags += ["--distributed-executor-backend", "mp", "--disable-custom-all-reduce"]
        return flags

    def _environment(self, side: VllmSide) -> dict[str, str]:
        environment = self._machine.environment(*shims("vllm")) | {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_CONFIG_PATH": str(self._logging),
            "VLLM_CACHE_ROOT": str(self._machine.folder / "vllm"),
            # For POST /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(later_port()),
        }
        if not self._machine.is_cuda:
            return environment | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        environment |= {
            "OMP_NUM_THREADS": "2",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_USE_DEEP_GEMM": "0",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        }
        if side.tp > 1:
            environment |= {"KVFERRY_ONE_GPU": "1", "VLLM_DISABLE_PYNCCL": "1"}
        return environment


# kvferry's endpoints log which transport a link takes; vLLM shows only its own loggers by default.
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(name)s %(levelname)s %(message)s"}},
    "handlers": {"stream": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        name: {"handlers": ["stream"], "level": "INFO", "propagate": False}
        for name in ("vllm", "kvferry")
    },
}


# ---------------------------------------------------------------- requests


class VllmAnswer(NamedTuple):
    """Tokens, and milliseconds from the first request to the first two and to prefill's answer."""

    tokens: list[int]
    first_ms: float
    second_ms: float
    prefill_ms: float = 0.0


def prompt(length: int, seed: object) -> list[int]:
    """Return random token ids, the same for the same arguments."""
    drawn = random.Random(f"{length}-{seed}")
    return [drawn.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]


def body(ids: Sequence[int], max_tokens: int, **more: object) -> Json:
    """Return a greedy request that is answered with token ids."""
    asked: Json = {"model": "m", "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0}
    return asked | {"ignore_eos": True, "return_token_ids": True} | more


def alone(server: Server, ids: Sequence[int], max_tokens: int, **more: object) -> VllmAnswer:
    """Ask one server."""
    began = time.perf_counter()
    tokens: list[int] = []
    times_ms: list[float] = []
    for chunk in stream(server, COMPLETIONS, body(ids, max_tokens, **more)):
        choices = chunk.document.get("choices")
        if choices and (new := choices[0].get("token_ids")):
            tokens += new
            times_ms += [1e3 * (chunk.at_s - began)] * len(new)
    # An answer of less than two tokens differs from any that is expected.
    first_ms, second_ms = [*times_ms, 0.0, 0.0][:2]
    return VllmAnswer(tokens, first_ms, second_ms)


def in_turn(
    prefill: Server, decode: Server, ids: Sequence[int], max_tokens: int, room: str | None = None
) -> VllmAnswer:
    """Ask prefill, and decode with its answer, as vLLM's proxies do."""
    params = PROXY if room is None else PROXY | {"kvferry": {"room": room}}
    began = time.perf_counter()
    first = post(prefill, COMPLETIONS, body(ids, 1, kv_transfer_params=params))
    prefill_ms = 1e3 * (time.perf_counter() - began)
    answer = alone(decode, ids, max_tokens, kv_transfer_params=first["kv_transfer_params"])
    times_ms = (prefill_ms + answer.first_ms, prefill_ms + answer.second_ms)
    return VllmAnswer(answer.tokens, *times_ms, prefill_ms)


def at_once(prefill: Server, decode: Server, ids: Sequence[int], max_tokens: int) -> VllmAnswer:
    """Ask both at the same time, as kvferry's router does."""
    own = {"room": secrets.token_hex(8)}
    first = {"do_remote_decode": True, "kvferry": own}
    second = {"do_remote_prefill": True, "kvferry": own | {"prefill": prefill.name}}
    with ThreadPoolExecutor(1) as pool:
        asked = body(ids, 1, kv_transfer_params=first)
        computed = pool.submit(post, prefill, COMPLETIONS, asked)
        answer = alone(decode, ids, max_tokens, kv_transfer_params=second)
        computed.result()
    return answer


def margin(server: Server, ids: Sequence[int]) -> float:
    """Return by how much the best token of one server beats the second best, in logits."""
    answer = post(server, COMPLETIONS, body(ids, 1, logprobs=2))
    best = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())
    return float(best[-1] - best[-2])


def is_idle(server: Server) -> bool:
    """Return whether a server has no requests and holds no blocks."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metric(server, f"vllm:{name}") for name in names)


def transfers(decode: Server) -> tuple[float, float]:
    """Return seconds and number of the transfers that a decode's connector has counted."""
    names = ("vllm:kvferry_receive_seconds", "vllm:nixl_xfer_time_seconds")
    seconds, count = (sum(metric(decode, f"{n}_{end}") for n in names) for end in ("sum", "count"))
    return seconds, count
