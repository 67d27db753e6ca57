"""Output with data-parallel attention (``--enable-dp-attention``) at prefill.

Each replica has all heads and its own requests. SGLang's Llama has no such attention, its Qwen3
has: so the model is a Qwen3 with the weights of the others, which answers something of its own.
"""

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
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rope_parameters", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
# How long the queries and keys are that Qwen3 makes equally long.
NORM = 1.5


class Attentive(NamedTuple):
    """A prefill server of two replicas, and a decode server."""

    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def qwen(model: Path, folder: Path) -> Path:
    made = folder / "qwen3"
    shutil.copytree(model, made, ignore=shutil.ignore_patterns("*.safetensors"))
    given = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = {name: getattr(given.config, name) for name in SAME}
    qwen = Qwen3ForCausalLM(Qwen3Config(**config, head_dim=given.config.head_dim)).float()
    qwen.load_state_dict(given.state_dict(), strict=False)
    for layer in qwen.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.constant_(norm.weight, NORM)
    qwen.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def own_reference(qwen: Path) -> Reference:
    return Reference(qwen)


@pytest.fixture(scope="module")
def attentive(qwen: Path, folder: Path, own_reference: Reference) -> Iterator[Attentive]:
    # Nobody asks the servers of earlier files any more.
    make_way()
    parallel = ("--dp-size", "2", "--enable-dp-attention")
    follow = ("--load-balance-method", "follow_bootstrap_room")
    sides = (
        Side(role="prefill", tp=2, page=16, flags=(*CHUNK, *parallel, *follow), arch="qwen3"),
        Side(role="decode", arch="qwen3"),
    )
    for servers in running(sides, qwen, folder):
        yield Attentive(*servers)


def test_reference_model_gives_an_answer(own_reference: Reference) -> None:
    """Or the comparisons below would hold whatever is carried."""
    said = [own_reference.answer(own_reference.ids(text), NUM_TOKENS) for text in (SHORT, LONG)]
    assert len({*said[0], *said[1]}) > NUM_TOKENS


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
def test_room_selects_the_sending_replica(
    attentive: Attentive, own_reference: Reference, replica: int, text: str
) -> None:
    prompt, room = own_reference.ids(text), new_room() // 2 * 2 + replica
    answers = ask(prompt, *attentive, room=room)
    assert answers.ids == own_reference.answer(prompt, NUM_TOKENS)


@pytest.mark.parametrize("replica", [0, 1])
def test_request_selects_the_sending_replica(
    attentive: Attentive, own_reference: Reference, replica: int
) -> None:
    """By name, where the room would mean the other one."""
    prompt, room = own_reference.ids(LONG), new_room() // 2 * 2 + 1 - replica
    answers = ask(
        prompt,
        *attentive,
        room=room,
        at_prefill={"routed_dp_rank": replica},
        disagg_prefill_dp_rank=replica,
    )
    assert answers.ids == own_reference.answer(prompt, NUM_TOKENS)
