"""Start, supervise and stop real SGLang servers on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvferry.testing.ports import later_port

HERE = Path(__file__).parent
ROOT = HERE.parent
START_S = 300.0
ANSWER_S = 120.0
STOP_S = 20.0
# What SGLang needs on a CPU for which its kernels are not compiled; float32, so that greedy ids
# can be compared with those of transformers.
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph"),
    *("--max-total-tokens", "4096", "--max-running-requests", "16", "--skip-server-warmup"),
    # Of what is free when a rank starts, less what anybody takes until it has loaded its weights.
    *("--mem-fraction-static", "0.95", "--dtype", "float32", "--sleep-on-idle"),
    *("--host", "127.0.0.1", "--log-level", "info"),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One server as it is to be started. ``times``: pipeline stages, or data-parallel replicas.

    ``arch`` is SGLang's file of the model.
    """

    role: str
    tp: int = 1
    page: int = 1
    flags: tuple[str, ...] = ()
    backend: str = "kvferry"
    times: int = 1
    arch: str = "llama"

    def __str__(self) -> str:
        return f"{self.role} TP{self.tp} page {self.page}" + f" x{self.times}" * (self.times > 1)


@dataclass
class Server:
    """One that runs. ``bootstrap`` is its port where it is a prefill server."""

    side: Side
    process: subprocess.Popen[bytes]
    port: int
    bootstrap: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Until it answers."""
        until_up(f"{self.url}/health", self.process, self.log)

    def kill(self) -> None:
        """All its processes at once, as a machine that fails."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()


_started: list[Server] = []


def until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until somebody answers there. The process is watched too: one that dies tells nobody."""
    until = time.monotonic() + START_S
    while not _answers(url):
        assert process.poll() is None, f"{url} has died:\n{tail(log)}"
        assert time.monotonic() < until, f"{url} did not start:\n{tail(log)}"
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-40:])


def start(side: Side, model: Path, folder: Path) -> Server:
    """Begin to start a server; ``wait`` for it."""
    port, bootstrap = later_port(), later_port()
    log = folder / f"{side.role}-tp{side.tp}-page{side.page}-{port}.log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS),
        *("--port", str(port), "--tp-size", str(side.tp), "--page-size", str(side.page)),
        *("--disaggregation-mode", side.role, "--disaggregation-transfer-backend", side.backend),
        *("--disaggregation-bootstrap-port", str(bootstrap), *side.flags),
    ]
    if side.role == "decode":
        command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    print(f"starting {side}, log {log}", flush=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment(side.tp * side.times, folder, side.arch),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(side, process, port, bootstrap, log)
    _started.append(server)
    return server


def make_way() -> None:
    """End all that were started, for others that need the memory."""
    while _started:
        _started.pop().stop()


def environment(ranks: int, folder: Path, arch: str = "llama") -> dict[str, str]:
    """Of a server: this checkout, its entry points, the stand-ins, and one core a rank."""
    points = folder / "entry-points"
    if not points.is_dir():
        subprocess.run([sys.executable, ROOT / "scripts" / "entry-points", points], check=True)
        for plugin in ("kvferry_broken", "kvferry_cpu"):
            _offer(plugin, points)
    path = [ROOT / "src", HERE / "standins", HERE / "broken", points]
    cores = os.cpu_count() or 1
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(ranks)),
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(arch)),
        # Short enough for a test to wait for, long enough for a busy machine.
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    }


def _offer(plugin: str, points: Path) -> None:
    """As if it were installed."""
    info = points / f"{plugin}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = {plugin}:register\n")


def _other_models(arch: str) -> list[str]:
    """Importing every model takes each scheduler half a minute."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    models = Path(spec.origin).parent / "srt" / "models"
    return sorted(path.stem for path in models.glob("*.py") if path.stem != arch)


def post(url: str, body: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """What a server answers; an error as ``{"error": ...}``."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode(errors="replace")
            return dict(json.loads(text)) if text.startswith("{") else {"text": text}
    except urllib.error.HTTPError as error:
        return {"error": error.read().decode(errors="replace"), "status": error.code}
    except OSError as error:
        return {"error": str(error), "status": 0}
