"""Servers that all tests share, because starting one takes a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reference import Reference
from servers import Server, Side, start

from kvferry.serve.models.smollm import default_model

# Chunks of 32 tokens: the long prompt has three.
CHUNK = ("--chunked-prefill-size", "32")
Starter = Callable[..., list[Server]]


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M: 9 query and 3 KV heads."""
    return default_model()


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def servers(model: Path, folder: Path) -> Iterator[Starter]:
    """Start servers side by side; they end with the module."""
    running: list[Server] = []

    def starter(*sides: Side) -> list[Server]:
        new = [start(side, model, folder) for side in sides]
        running.extend(new)
        for server in new:
            server.wait()
        print(f"up: {', '.join(str(server.side) for server in new)}", flush=True)
        return new

    yield starter
    for server in running:
        server.stop()
