"""Servers shared by tests, because starting one takes a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from reference import Reference
from servers import Server, Side, start

from kvferry.reference.models.find import default_model

# Chunks of 32 tokens; the long prompt has three.
CHUNK = ("--chunked-prefill-size", "32")


class Servers(NamedTuple):
    """Two prefill servers, TP1 and TP3, that both work with the decode server."""

    prefill_tp1: Server
    prefill_tp3: Server
    decode: Server


class PaddedServers(NamedTuple):
    """Servers with 2 ranks for 3 KV heads, which SGLang pads to 4 on a CPU."""

    prefill_tp2: Server
    decode_tp2: Server


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M, which has 9 query and 3 KV heads."""
    return default_model()


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


def running(sides: tuple[Side, ...], model: Path, folder: Path) -> Iterator[list[Server]]:
    """Start servers at the same time, and stop them after the tests."""
    started = [start(side, model, folder) for side in sides]
    try:
        for server in started:
            server.wait()
        print(f"up: {', '.join(str(server.side) for server in started)}", flush=True)
        yield started
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="session")
def servers(model: Path, folder: Path, reference: Reference) -> Iterator[Servers]:
    sides = (
        Side(role="prefill", flags=CHUNK),
        Side(role="prefill", tp=3, page=16, flags=CHUNK),
        Side(role="decode", page=16),
    )
    for started in running(sides, model, folder):
        yield Servers(*started)


@pytest.fixture(scope="module")
def padded(model: Path, folder: Path, reference: Reference) -> Iterator[PaddedServers]:
    sides = (
        Side(role="prefill", tp=2, page=16, flags=CHUNK),
        Side(role="decode", tp=2, page=1),
    )
    for started in running(sides, model, folder):
        yield PaddedServers(*started)
