"""Servers shared by tests, because starting one takes a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from reference import Reference
from servers import Server, Side, start

from kvferry.reference.models.find import default_model

# Chunks of 32 tokens: the long prompt has three.
CHUNK = ("--chunked-prefill-size", "32")


class Cast(NamedTuple):
    """Any of the prefill servers goes with the decode server."""

    one: Server
    three: Server
    decode: Server


class PaddedCast(NamedTuple):
    """Two ranks for 3 KV heads: SGLang pads them on a CPU, and the padding stays there."""

    two: Server
    decode_two: Server


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


def running(sides: tuple[Side, ...], model: Path, folder: Path) -> Iterator[list[Server]]:
    """Started side by side, and ended together."""
    servers = [start(side, model, folder) for side in sides]
    try:
        for server in servers:
            server.wait()
        print(f"up: {', '.join(str(server.side) for server in servers)}", flush=True)
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="session")
def cast(model: Path, folder: Path, reference: Reference) -> Iterator[Cast]:
    sides = (
        Side(role="prefill", flags=CHUNK),
        Side(role="prefill", tp=3, page=16, flags=CHUNK),
        Side(role="decode", page=16),
    )
    for servers in running(sides, model, folder):
        yield Cast(*servers)


@pytest.fixture(scope="module")
def padded(model: Path, folder: Path, reference: Reference) -> Iterator[PaddedCast]:
    sides = (
        Side(role="prefill", tp=2, page=16, flags=CHUNK),
        Side(role="decode", tp=2, page=1),
    )
    for servers in running(sides, model, folder):
        yield PaddedCast(*servers)
