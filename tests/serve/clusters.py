"""A whole cluster of real processes on a small model, and answers to compare with."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from serve.driving import ask, engine_of

from kvferry.serve.cluster import Cluster, Model
from kvferry.serve.launch import Child, Launch
from kvferry.serve.requests import Request

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


def segments() -> set[str]:
    """Shared memory of ours on this machine."""
    folder = "/dev/shm"
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {name for name in names if name.startswith("kvferry-")}


class Running:
    """A cluster that runs, and the same model in this process for comparison."""

    def __init__(self, launch: Launch, url: str, folder: Path) -> None:
        self.launch, self.url = launch, url
        self._folder = folder

    def __getitem__(self, name: str) -> Child:
        return self.launch[name]

    def expected(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        """What a single process answers. Called after the cluster has."""
        with engine_of(self._folder, prefix_cache=False) as engine:
            requests = [
                Request(
                    id=str(i),
                    prompt=tuple(engine.tokenizer.encode(prompt)),
                    max_tokens=max_tokens,
                )
                for i, prompt in enumerate(prompts)
            ]
            return [answer.tokens for answer in ask(engine, requests)]

    def workers(self) -> dict[str, Any]:
        """What the router knows of its workers."""
        return {worker["name"]: worker for worker in get(self.url, "/healthz")["workers"]}

    def wait_up(self, *names: str) -> None:
        wait_until(lambda: all(self.is_up(name) for name in names), f"{names} to be up")

    def is_up(self, name: str) -> bool:
        return bool(self.workers().get(name, {}).get("up"))

    def health(self, name: str) -> Any:
        """What a worker says of itself."""
        return get(self.workers()[name]["url"], "/healthz")

    def wait_idle(self, *names: str) -> None:
        """Wait until nothing of any request is left in these workers."""
        for name in names:
            url = self.workers()[name]["url"]

            def idle(url: str = url) -> bool:
                told = get(url, "/healthz")
                return not any(told[key] for key in ("running", "waiting", "rooms", "used_pages"))

            wait_until(idle, f"{name} to be idle: {get(url, '/healthz')}")


@contextmanager
def running(folder: Path, **fields: Any) -> Iterator[Running]:
    """A cluster as ``kvferry serve`` would start it, without its supervision."""
    described = {"router": {"port": 0, "poll_s": 0.2}, "rendezvous": {"port": 0}} | fields
    cluster = msgspec.convert(described, Cluster)
    with Launch() as launch:
        url = launch.start_all(cluster, Model(folder, NAME), lambda *_: None)
        yield Running(launch, url, folder)
