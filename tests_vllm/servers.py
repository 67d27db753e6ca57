"""Real ``vllm serve`` processes on this machine's CPU, and requests to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvferry import ClusterKey
from kvferry.testing.ports import later_port

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
START_S = 300.0
STOP_S = 10.0
MAX_LEN = 2048
CACHE_BYTES = 256 << 20
BLOCK_TOKENS = 32
# Prefix of rooms that the connector of ``skipping.py`` does not transfer.
SKIPPED = "skip-"
# Prefix of rooms of which it does not transfer the recurrent state.
STATELESS = "stateless-"
Json = dict[str, Any]


def log(text: str) -> None:
    """Print a progress message."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class HttpError(Exception):
    """A server answered with an error."""

    def __init__(self, status: int, document: str) -> None:
        super().__init__(f"status {status}: {document[:500]}")
        self.status = status


def ask(url: str, body: Json | None = None, timeout_s: float = 180.0) -> Json:
    """Send a request and return the JSON answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        raise HttpError(error.code, error.read().decode(errors="replace")) from None
    return dict(json.loads(text)) if text.startswith("{") else {"text": text}


class Server:
    """An HTTP server process with a log file."""

    def __init__(self, name: str, command: list[str], port: int, environment: Mapping[str, str]):
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(tempfile.gettempdir()) / f"kvferry-vllm-{os.getpid()}-{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(os.environ) | dict(environment),
                cwd=ROOT,
                # A process group, so that all processes can be signalled, but no new session: see
                # docs/connectors/vllm.md, "More workers than cores".
                process_group=0,
            )

    def wait_until_up(self, path: str = "/health") -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended: {self.tail()}")
            try:
                ask(self.url + path, timeout_s=5)
                return
            except (OSError, HttpError):
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not up after {START_S:.0f} s: {self.tail()}")

    def tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            # vLLM's API server may take very long to end by itself.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
            self.process.kill()
            # Without a timeout: the kernel may take long to free a gigabyte.
            self.process.wait()
        self._end_rest()

    def _end_rest(self) -> None:
        """Give resource trackers time to clean up, then kill the rest of the group."""
        deadline = time.monotonic() + STOP_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                self.signal(0)
                time.sleep(0.1)
            self.signal(signal.SIGKILL)


def environment(entry_points: Path) -> dict[str, str]:
    """Return every server's environment: this checkout, no hub access, all cores."""
    return {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{entry_points}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # UCX within one machine: skip network devices.
        "UCX_LOG_LEVEL": "error",
    }


class Deployment:
    """A discovery service and the servers started with it. Its exit stops them all."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self.discovery = ""

    def __enter__(self) -> Deployment:
        # Stop the engines on SIGTERM, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory()))
        script = str(ROOT / "scripts" / "entry-points")
        subprocess.run([sys.executable, script, str(folder)], check=True)
        self.environment = environment(folder)
        self._key = folder / "cluster.key"
        ClusterKey.new().write(self._key)
        port = later_port()
        command = [sys.executable, "-m", "kvferry", "serve", "discovery", "--port", str(port)]
        server = self.start("discovery", [*command, "--key", str(self._key)], port)
        server.wait_until_up("/healthz")
        self.discovery = server.url
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def start(self, name: str, command: list[str], port: int, **more: str) -> Server:
        """Start a server that ends with the deployment."""
        server = Server(name, command, port, self.environment | more)
        self._undo.callback(server.stop)
        return server

    def vllm(
        self,
        name: str,
        model: Path,
        *,
        tp: int = 1,
        transfer: Json | None = None,
        cache_bytes: int = CACHE_BYTES,
        more: str = "",
        **variables: str,
    ) -> Server:
        """Start an engine; ``transfer`` is its ``--kv-transfer-config``."""
        port = later_port()
        command = [str(BIN / "vllm"), "serve", str(model), "--served-model-name", "m"]
        command += ["--port", str(port), "--host", "127.0.0.1", "--tensor-parallel-size", str(tp)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LEN)]
        command += ["--kv-cache-memory-bytes", str(cache_bytes // tp), "--max-num-seqs", "16"]
        command += ["--block-size", str(BLOCK_TOKENS), "--disable-uvicorn-access-log"]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        # With one rank, run the worker in the engine's process, as on a GPU. That saves 8 s of
        # importing vLLM.
        in_one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if tp == 1 else {}
        return self.start(name, command + more.split(), port, **(in_one | variables))

    def router(self, prefills: list[Server], *decodes: Server, replicas: str = "") -> Server:
        """Start kvferry's router; ``replicas`` is the suffix of prefill names."""
        port = later_port()
        command = [sys.executable, "-m", "kvferry", "serve", "router", "--engine", "vllm"]
        command += ["--port", str(port)]
        command += [f"--prefill-url={each.name}{replicas}={each.url}" for each in prefills]
        command += [f"--decode-url={each.name}={each.url}" for each in decodes]
        server = self.start("router", command, port)
        server.wait_until_up("/healthz")
        names = {each.name for each in decodes} | {each.name + replicas for each in prefills}
        while {w["name"] for w in ask(server.url + "/healthz")["workers"] if w["up"]} != names:
            time.sleep(0.2)
        return server

    def connector(self, role: str, instance: str, policy: str = "fail", **extra: object) -> Json:
        """Return the value of ``--kv-transfer-config`` for kvferry."""
        own = {"discovery": self.discovery, "instance": instance, "key_file": str(self._key)}
        return {
            "kv_connector": "KVFerryConnector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": own | extra,
        }


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print what is done and how long it took."""
    log(f"{what} ...")
    began = time.monotonic()
    yield
    log(f"{what}: {time.monotonic() - began:.1f} s")


def complete(server: Server, prompt: object, max_tokens: int, **more: object) -> Json:
    """Return a greedy completion with its token ids."""
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return ask(server.url + "/v1/completions", body | {"return_token_ids": True} | more)


def stream(server: Server, path: str = "completions", **fields: object) -> list[Json]:
    """Return the chunks of a greedy, streamed answer."""
    body = {"model": "m", "temperature": 0, "stream": True, "max_tokens": 12} | fields
    body |= {"stream_options": {"include_usage": True}}
    events = ask(f"{server.url}/v1/{path}", body)["text"].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def metric(server: Server, name: str) -> float:
    """Return the sum of a metric's series."""
    lines = ask(server.url + "/metrics")["text"].splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def token_ids(answer: Json) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def prefilled_then_decoded(
    prefill: Server, decode: Server, prompt: object, max_tokens: int, **more: object
) -> Json:
    """Send a request to prefill, and then to decode with prefill's answer."""
    first = complete(prefill, prompt, 1, kv_transfer_params={"do_remote_decode": True})
    params = first["kv_transfer_params"]
    return complete(decode, prompt, max_tokens, kv_transfer_params=params, **more)
