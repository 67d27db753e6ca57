"""Transfers between pages of vLLM's CPU kernels, which keep K by columns."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from kvferry import DiscoveryServer
from kvferry.connectors.vllm.caches import EngineShape
from kvferry.connectors.vllm.cpu_pages import has_columns
from kvferry.connectors.vllm.metadata import (
    DecodeMetadata,
    HeldRoom,
    OpenRoom,
    PrefillMetadata,
    PushTokens,
    ReceiveRoom,
)
from kvferry.connectors.vllm.settings import read_settings
from kvferry.connectors.vllm.worker import ConnectorWorker

HEADS, DIM, TOKENS = 3, 8, 75
NAME = "model.layers.0.self_attn.attn"


def made(
    stack: ExitStack, url: str, block: int, *, sends: bool
) -> tuple[ConnectorWorker, torch.Tensor]:
    cache = torch.zeros((6, HEADS, block, 2 * DIM), dtype=torch.bfloat16)
    name = "prefill" if sends else "decode"
    settings = read_settings({"discovery": url, "instance": name, "transport": "nixl"})
    worker = ConnectorWorker(settings, None, name, "m")
    shape = EngineShape(1, (1,), 0, HEADS, block, on_cpu=True, k_dim=DIM, has_columns=True)
    worker.register({NAME: cache}, shape, sends=sends, receives=not sends, fails_early=False)
    stack.callback(worker.close)
    return worker, cache


def areas(cache: torch.Tensor, blocks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of these blocks as [heads, tokens, elements]."""
    _, heads, block, content = cache.shape
    k, v = cache.view(-1, heads, 2 * block, content // 2).chunk(2, dim=2)
    columns = k.reshape(-1, heads, content // 2, block).transpose(2, 3)
    columns, rows = (torch.cat([each[b] for b in blocks], dim=1) for each in (columns, v))
    return columns[:, :TOKENS], rows[:, :TOKENS]


@pytest.mark.parametrize(
    ("there", "here"), [((32, (4, 0, 3)), (32, (5, 1, 2))), ((16, (4, 0, 3, 5, 1)), (64, (5, 2)))]
)
def test_blocks_of_any_size_arrive(
    there: tuple[int, tuple[int, ...]], here: tuple[int, tuple[int, ...]]
) -> None:
    with ExitStack() as stack:
        server = DiscoveryServer().start()
        stack.callback(server.stop)
        prefill, computed = made(stack, server.url, there[0], sends=True)
        decode, arrived = made(stack, server.url, here[0], sends=False)
        order = ReceiveRoom("d", "room", "prefill", TOKENS, 0, (here[1],), b"d")
        decode.start_receives(DecodeMetadata([order]))
        pushed = [PushTokens("room", TOKENS, 0, (there[1],), b"d")]
        metadata = PrefillMetadata([OpenRoom("p", "room", TOKENS)], pushed)
        prefill.begin_step(metadata)
        computed.copy_(torch.rand(computed.shape))
        prefill.end_step(metadata)
        prefill.begin_step(PrefillMetadata(held=[HeldRoom("p", "room")]))
        received: set[str] = set()
        while not received:
            results = decode.take_arrivals(wait_s=0.001)
            assert not results.failed, results.reasons
            received |= results.received
        for sent, got in zip(areas(computed, there[1]), areas(arrived, here[1]), strict=True):
            assert torch.equal(sent, got)
        rest = set(range(6)) - set(here[1])
        assert not np.any([arrived[block].any().item() for block in rest])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllms_operator_the_form_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    assert not has_columns(torch.zeros(2, 1, 32, 16), "auto")
    assert "unknown-cpu-pages" in caplog.text
    assert not has_columns(torch.zeros(2, 1, 32, 16), "fp8")
