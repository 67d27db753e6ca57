"""Output with two pipeline stages or two data-parallel replicas at prefill."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import CHUNK, running
from pairs import NUM_TOKENS, ask, new_room
from prompts import LONG, SHORT
from reference import Reference
from servers import Server, Side, make_way
from transformers import AutoModelForCausalLM


class Staged(NamedTuple):
    """Either of the prefill servers goes with the decode server."""

    stages: Server
    replicas: Server
    decode: Server


@pytest.fixture(scope="module")
def untied(model: Path, folder: Path) -> Path:
    """The same model with a head of its own: SGLang's last stage looks for it in vain otherwise."""
    made = folder / "untied"
    shutil.copytree(model, made, ignore=shutil.ignore_patterns("*.safetensors"))
    copied = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    copied.config.tie_word_embeddings = False
    copied.lm_head.weight = torch.nn.Parameter(copied.model.embed_tokens.weight.detach().clone())
    copied.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def staged(untied: Path, folder: Path, reference: Reference) -> Iterator[Staged]:
    # Nobody asks the servers of earlier files any more.
    make_way()
    follow = ("--load-balance-method", "follow_bootstrap_room")
    sides = (
        Side(role="prefill", page=16, flags=(*CHUNK, "--pp-size", "2"), times=2),
        Side(role="prefill", page=16, flags=(*CHUNK, "--dp-size", "2", *follow), times=2),
        Side(role="decode"),
    )
    for servers in running(sides, untied, folder):
        yield Staged(*servers)


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
def test_both_stages_send_their_layers(staged: Staged, reference: Reference, text: str) -> None:
    prompt = reference.ids(text)
    assert ask(prompt, staged.stages, staged.decode).ids == reference.answer(prompt, NUM_TOKENS)


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
def test_room_selects_the_sending_replica(
    staged: Staged, reference: Reference, replica: int, text: str
) -> None:
    prompt, room = reference.ids(text), new_room() // 2 * 2 + replica
    answers = ask(prompt, staged.replicas, staged.decode, room=room)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
