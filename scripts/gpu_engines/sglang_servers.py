"""SGLang servers of a run, and requests to a pair of them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gpu_engines.client import ANSWER_S, Json, RequestFailed, post, stream
from gpu_engines.machine import DeviceKind, Machine, shims
from gpu_engines.model import FIRST_WORD, VOCABULARY, ModelSize
from gpu_engines.servers import Server, Spec
from kvferry.testing.ports import later_port

GENERATE = "/generate"
# Rooms that end in these bits get wrong pages (tests_sglang/broken).
WRONG = (1 << 24) - 1
_rooms = random.SystemRandom()


class SglangSide(NamedTuple):
    """One server; ``role`` is None for one that does everything."""

    role: str | None = None
    tp: int = 1
    page: int = 16
    backend: str = "kvferry"
    is_timed: bool = False
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


class SglangScale(NamedTuple):
    """Sizes that depend on the machine: of the model for equality, and of the one for figures."""

    model: ModelSize
    timed_model: ModelSize
    pool_tokens: int
    timed_pool_tokens: int
    chunk: int
    timed_chunk: int
    pages: tuple[int, int]
    lengths: tuple[int, ...]
    timed_lengths: tuple[int, ...]


GPU = SglangScale(
    model=ModelSize(16, 8, 8, 1024, 2048),
    timed_model=ModelSize(64, 8, 8, 1024, 2048),
    pool_tokens=12_288,
    timed_pool_tokens=36_864,
    chunk=1024,
    timed_chunk=8192,
    pages=(16, 64),
    lengths=(1, 7, 65, 1000, 3000),
    timed_lengths=(512, 8192, 32_768),
)
CPU = SglangScale(
    model=ModelSize(4, 4, 2, 256, 512),
    timed_model=ModelSize(4, 4, 2, 256, 512),
    pool_tokens=4096,
    timed_pool_tokens=4096,
    chunk=128,
    timed_chunk=512,
    pages=(16, 64),
    lengths=(1, 7, 65, 300),
    timed_lengths=(65, 600),
)


def scale_on(device: DeviceKind) -> SglangScale:
    """Return the sizes for a kind of device."""
    return GPU if device is DeviceKind.CUDA else CPU


class SglangServers:
    """Commands of all servers of a run."""

    def __init__(self, machine: Machine) -> None:
        self.is_cuda = machine.is_cuda
        self.scale = scale_on(machine.device)
        self._machine = machine

    def specs(self) -> dict[str, Spec]:
        """Return how to start each server."""
        small, large = self.scale.pages
        radix = ("--disaggregation-decode-enable-radix-cache",)
        nixl = {"KVFERRY_TRANSPORT": "nixl"}
        sides = {
            "alone32": SglangSide(None, 1, 1),
            "p32": SglangSide("prefill", 1, small),
            "d32": SglangSide("decode", 1, large, flags=radix),
            "p32x2": SglangSide("prefill", 2, small),
            "d32x2": SglangSide("decode", 2, small),
            "alone16": SglangSide(None, 1, large, is_timed=True),
            "p16": SglangSide("prefill", 1, large, is_timed=True),
            "d16": SglangSide("decode", 1, large, is_timed=True),
            "p16-nixl": SglangSide("prefill", 1, large, is_timed=True, environment=nixl),
            "d16-nixl": SglangSide("decode", 1, large, is_timed=True, environment=nixl),
            "sglang-p": SglangSide("prefill", 1, large, "nixl", is_timed=True),
            "sglang-d": SglangSide("decode", 1, large, "nixl", is_timed=True),
        }
        return {name: self._sglang(name, side) for name, side in sides.items()}

    def own_router(self, prefill: Server, decode: Server) -> Spec:
        """Return how to start kvferry's router over a pair."""
        port = later_port()
        command = [sys.executable, "-m", "kvferry", "serve", "router", "--engine", "sglang"]
        command += ["--prefill-url", f"127.0.0.1:{prefill.bootstrap}={prefill.url}"]
        command += ["--decode-url", decode.url, "--port", str(port)]
        return Spec("own-router", command, port, self._machine.environment(), "/healthz")

    def sglang_router(self, prefill: Server, decode: Server) -> Spec:
        """Return how to start SGLang's router over a pair."""
        port = later_port()
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--prefill", prefill.url, str(prefill.bootstrap), "--decode", decode.url]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(later_port())]
        environment = self._machine.environment(*self._shims())
        return Spec("sglang-router", command, port, environment, "/readiness")

    def _sglang(self, name: str, side: SglangSide) -> Spec:
        scale, port, bootstrap = self.scale, later_port(), later_port()
        model = self._machine.models[scale.timed_model if side.is_timed else scale.model]
        tokens = scale.timed_pool_tokens if side.is_timed else scale.pool_tokens
        chunk = scale.timed_chunk if side.is_timed else scale.chunk
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "m", "--random-seed", "1"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "bfloat16" if side.is_timed else "float32"]
        command += ["--tp-size", str(side.tp), "--page-size", str(side.page)]
        command += ["--max-total-tokens", str(tokens), "--chunked-prefill-size", str(chunk)]
        command += ["--max-running-requests", "32", "--grammar-backend", "none"]
        command += ["--sampling-backend", "pytorch", "--skip-server-warmup", "--enable-metrics"]
        command += side.flags
        if not side.flags:
            command += ["--disable-radix-cache"]
        if side.role is not None:
            command += ["--disaggregation-mode", side.role]
            command += ["--disaggregation-transfer-backend", side.backend]
            command += ["--disaggregation-bootstrap-port", str(bootstrap)]
        if side.role == "decode":
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        environment = {**self._environment(side), **side.environment}
        command += self._device_flags(side)
        return Spec(name, command, port, environment, bootstrap=bootstrap)

    def _device_flags(self, side: SglangSide) -> list[str]:
        if not self.is_cuda:
            return [
                *("--device", "cpu", "--attention-backend", "torch_native"),
                *("--disable-cuda-graph", "--disable-overlap-schedule"),
                *("--mem-fraction-static", "0.95", "--sleep-on-idle"),
            ]
        flags = ["--device", "cuda", "--attention-backend", "triton"]
        # Captured graphs need kernels that the payload leaves out.
        flags += ["--cuda-graph-backend-decode", "disabled"]
        flags += ["--cuda-graph-backend-prefill", "disabled", "--disable-custom-all-reduce"]
        # Each server sees the memory that the others have taken so far.
        flags += ["--mem-fraction-static", "0.95", "--context-length", "40000"]
        return flags + (["--gpu-id-step", "0"] if side.tp > 1 else [])

    def _environment(self, side: SglangSide) -> dict[str, str]:
        environment = self._machine.environment(*self._shims()) | {
            # Importing every model takes each scheduler half a minute.
            "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(self._machine.site)),
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
        }
        if self.is_cuda:
            environment |= {
                "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
                "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            }
            if side.tp == 1:
                return environment
            # Other servers take memory while two ranks compare how much they find free.
            return environment | {
                "KVFERRY_ONE_GPU": "1",
                "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            }
        return environment | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(side.tp)),
        }

    def _shims(self) -> Sequence[Path]:
        return shims("sglang" if self.is_cuda else "sglang on a CPU", "broken")


def _other_models(site: Path | None) -> list[str]:
    if site is None:
        spec = find_spec("sglang")
        if spec is None or spec.origin is None:
            raise SystemExit("this Python has no SGLang; install it, or leave out --installed")
        package = Path(spec.origin).parent
    else:
        package = site / "sglang"
    return sorted(
        path.stem for path in (package / "srt/models").glob("*.py") if path.stem != "llama"
    )


# ---------------------------------------------------------------- requests


class SglangAnswer(NamedTuple):
    """Tokens, and milliseconds from the request to the first token."""

    tokens: list[int]
    first_ms: float


def prompt(length: int, seed: object) -> list[int]:
    """Return random token ids, the same for the same arguments."""
    drawn = random.Random(f"{length}-{seed}")
    return [drawn.randrange(FIRST_WORD, VOCABULARY) for _ in range(length)]


def new_room(*, is_wrong: bool = False) -> int:
    """Return a room's id, as routers draw them; wrong pages are sent for a wrong one."""
    room = _rooms.randrange(1, 1 << 62)
    return room | WRONG if is_wrong else room & ~1


def body(ids: Sequence[int], max_tokens: int, **more: object) -> Json:
    """Return a greedy request."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, **more}


def alone(server: Server, ids: Sequence[int], max_tokens: int, **more: object) -> SglangAnswer:
    """Ask one server. SGLang ends the stream of a failed request with an event that says so."""
    began, first_s, document = time.perf_counter(), 0.0, {}
    for chunk in stream(server, GENERATE, body(ids, max_tokens, **more)):
        first_s = first_s or chunk.at_s
        document = chunk.document
        reason = document["meta_info"]["finish_reason"] or {}
        if reason.get("type") == "abort":
            status = int(reason.get("status_code") or 200)
            raise RequestFailed(server, status, str(reason.get("message")))
    return SglangAnswer(list(document["output_ids"]), 1e3 * (first_s - began))


def at_once(
    prefill: Server, decode: Server, ids: Sequence[int], max_tokens: int, room: int | None = None
) -> SglangAnswer:
    """Ask both sides at the same time, as routers do."""
    place: Any = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap}
    place["bootstrap_room"] = room or new_room()
    with ThreadPoolExecutor(1) as pool:
        asked = body(ids, max_tokens, **place)
        computed = pool.submit(post, prefill, GENERATE, asked, ANSWER_S)
        answer = alone(decode, ids, max_tokens, **place)
        computed.result()
    return answer


def is_idle(server: Server) -> bool:
    """Return whether no request is anywhere in a server: only then it flushes its cache."""
    try:
        post(server, "/flush_cache", {})
    except Exception:
        return False
    return True
