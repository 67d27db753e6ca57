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
SWITCHABLE = "--enable-pd-role-switch"
# SGLang's kernels are not compiled for this CPU, so PyTorch computes. In float32 greedy token ids
# equal those of transformers.
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph"),
    *("--max-total-tokens", "4096", "--max-running-requests", "16", "--skip-server-warmup"),
    # Share of the memory that is free when a rank starts, while other ranks load their weights.
    *("--mem-fraction-static", "0.95", "--dtype", "float32", "--sleep-on-idle"),
    *("--host", "127.0.0.1", "--log-level", "info"),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """How to start a server.

    ``times``: number of pipeline stages or data-parallel replicas. ``arch``: SGLang's module of the
    model.
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
    """A running server. ``bootstrap`` is the port of its bootstrap server."""

    side: Side
    process: subprocess.Popen[bytes]
    port: int
    bootstrap: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until the server is healthy."""
        wait_until_up(f"{self.url}/health", self.process, self.log)

    def log_text(self) -> str:
        """Return what the server has logged."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill all processes of the server at once, as the failure of a machine does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()


_started: list[Server] = []


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a GET succeeds; fail if the process ends or does not start in time."""
    deadline = time.monotonic() + START_S
    while not is_up(url):
        assert process.poll() is None, f"{url} has died:\n{tail(log)}"
        assert time.monotonic() < deadline, f"{url} did not start:\n{tail(log)}"
        time.sleep(0.5)


def is_up(url: str) -> bool:
    """Return whether a GET succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tail(log: Path) -> str:
    """Return the end of a log without what Triton prints when a process ends."""
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if not line.startswith((" - leaked", " - ... skipped", "nanobind:", "See https://nanobind"))
    ]
    return "\n".join(line[:300] for line in lines[-40:])


def start(side: Side, model: Path, folder: Path) -> Server:
    """Start a server and return at once; ``Server.wait`` waits until it is up."""
    port, bootstrap = later_port(), later_port()
    log = folder / f"{side.role}-tp{side.tp}-page{side.page}-{port}.log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS),
        *("--port", str(port), "--tp-size", str(side.tp), "--page-size", str(side.page)),
        *("--disaggregation-mode", side.role, "--disaggregation-transfer-backend", side.backend),
        *("--disaggregation-bootstrap-port", str(bootstrap), *side.flags),
    ]
    if side.role == "decode" or SWITCHABLE in side.flags:
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


def stop_all() -> None:
    """Stop all servers of earlier test files, to free their memory."""
    while _started:
        _started.pop().stop()


def environment(ranks: int, folder: Path, arch: str = "llama") -> dict[str, str]:
    """Return a server's environment: this checkout, its plugins, stand-ins, one core per rank."""
    points = folder / "entry-points"
    if not points.is_dir():
        subprocess.run([sys.executable, ROOT / "scripts" / "entry-points", points], check=True)
        for plugin in ("kvferry_broken", "kvferry_cpu"):
            _write_entry_point(plugin, points)
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
        # Tests wait for these timeouts; a busy machine must not reach them otherwise.
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    }


def _write_entry_point(plugin: str, points: Path) -> None:
    """Let SGLang find a plugin as if it were installed."""
    info = points / f"{plugin}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugin} = {plugin}:register\n")


def _other_models(arch: str) -> list[str]:
    """Return the models to disable: importing all of them takes each scheduler half a minute."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    models = Path(spec.origin).parent / "srt" / "models"
    return sorted(path.stem for path in models.glob("*.py") if path.stem != arch)


def post(url: str, body: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """Return a server's response; ``{"error": ..., "status": ...}`` if the request failed."""
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
