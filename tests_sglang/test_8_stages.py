"""Output with two pipeline stages or two data-parallel replicas at prefill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import CHUNK, running
from pairs import NUM_TOKENS, generate, new_room
from prompts import LONG, SHORT
from reference import Reference
from servers import Server, Side, stop_all
from transformers import AutoModelForCausalLM


class ParallelServers(NamedTuple):
    """Two prefill servers that both work with the decode server."""

    stages: Server
    replicas: Server
    decode: Server


@pytest.fixture(scope="module")
def untied(model: Path, folder: Path) -> Path:
    """A copy of the model with its own LM head, because SGLang's last stage cannot tie it."""
    copy = folder / "untied"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    untied = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.model.embed_tokens.weight.detach().clone())
    untied.save_pretrained(copy)
    return copy


@pytest.fixture(scope="module")
def parallel(untied: Path, folder: Path, reference: Reference) -> Iterator[ParallelServers]:
    stop_all()
    follow = ("--load-balance-method", "follow_bootstrap_room")
    sides = (
        Side(role="prefill", page=16, flags=(*CHUNK, "--pp-size", "2"), times=2),
        Side(role="prefill", page=16, flags=(*CHUNK, "--dp-size", "2", *follow), times=2),
        Side(role="decode"),
    )
    for started in running(sides, untied, folder):
        yield ParallelServers(*started)


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
def test_both_stages_send_their_layers(
    parallel: ParallelServers, reference: Reference, text: str
) -> None:
    prompt = reference.ids(text)
    assert generate(prompt, parallel.stages, parallel.decode).ids == reference.answer(
        prompt, NUM_TOKENS
    )


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
def test_room_selects_the_sending_replica(
    parallel: ParallelServers, reference: Reference, replica: int, text: str
) -> None:
    prompt, room = reference.ids(text), new_room() // 2 * 2 + replica
    answers = generate(prompt, parallel.replicas, parallel.decode, room=room)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
