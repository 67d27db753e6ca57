"""A whole cluster of real processes on a small model, and answers to compare with."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from reference.driving import ask, engine_of
from reference.working import is_idle

from kvferry.reference.cluster.description import ClusterDescription
from kvferry.reference.cluster.launch import ChildProcess, ClusterLaunch
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.models.find import ModelFolder

# The machine may be busy with other things.
PATIENCE_S = 90.0
NAME = "small"


def wait_until(holds: Callable[[], object], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {why}"
        time.sleep(0.05)


def get(url: str, path: str) -> Any:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and document of a completion."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


# ---------------------------------------------------------------- processes


def processes() -> dict[int, int]:
    """The parent of every process that has not ended."""
    told = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = (line.split() for line in told.stdout.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def family(pid: int) -> set[int]:
    """All descendants of a process."""
    parents = processes()
    found, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found |= fresh
    return found


def segments(pids: Iterable[int]) -> set[Path]:
    """kvferry's shared memory that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in re.findall(r"/dev/shm/kvferry-\w+", maps)}
    return found


def demand_gone(pids: set[int], files: set[Path]) -> None:
    """Wait until these processes have ended and their shared memory is given back."""
    wait_until(lambda: not pids & set(processes()), "every process to end")
    wait_until(lambda: not any(file.exists() for file in files), "shared memory to be given back")


class Running:
    """A cluster that runs, and the same model in this process for comparison."""

    def __init__(self, launch: ClusterLaunch, url: str, folder: Path) -> None:
        self.launch, self.url = launch, url
        self._folder = folder

    def __getitem__(self, name: str) -> ChildProcess:
        return self.launch[name]

    def pids(self, *names: str) -> set[int]:
        """The processes of these parts, with their ranks."""
        started = [self.launch[name].process.pid for name in names]
        return {*started}.union(*map(family, started))

    def expected(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        """The answers of a single process. Call it after the cluster has answered."""
        with engine_of(self._folder, prefix_cache=False) as engine:
            requests = [
                EngineRequest(
                    id=str(i),
                    prompt=tuple(engine.tokenizer.encode(prompt)),
                    max_tokens=max_tokens,
                )
                for i, prompt in enumerate(prompts)
            ]
            return [answer.tokens for answer in ask(engine, requests)]

    def workers(self) -> dict[str, Any]:
        """The router's view of its workers."""
        return {worker["name"]: worker for worker in get(self.url, "/healthz")["workers"]}

    def wait_up(self, *names: str) -> None:
        wait_until(lambda: all(self.is_up(name) for name in names), f"{names} to be up")

    def is_up(self, name: str) -> bool:
        return bool(self.workers().get(name, {}).get("up"))

    def health(self, name: str) -> Any:
        """A worker's own health report."""
        return get(self.workers()[name]["url"], "/healthz")

    def wait_idle(self, *names: str) -> None:
        """Wait until nothing of any request is left in these workers."""
        for name in names:
            url = self.workers()[name]["url"]

            def idle(url: str = url) -> bool:
                told = get(url, "/healthz")
                return is_idle(told)

            wait_until(idle, f"{name} to be idle: {get(url, '/healthz')}")


@contextmanager
def running(folder: Path, **fields: Any) -> Iterator[Running]:
    """A cluster as ``kvferry serve`` would start it, without its supervision."""
    usual = {"router": {"port": 0, "poll_s": 0.2}, "discovery": {"port": 0}, "transport": "shm"}
    described = usual | fields
    cluster = msgspec.convert(described, ClusterDescription)
    with ClusterLaunch() as launch:
        url = launch.start_all(cluster, ModelFolder(folder, NAME), lambda *_: None)
        yield Running(launch, url, folder)
