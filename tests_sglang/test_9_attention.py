"""Output with data-parallel attention (``--enable-dp-attention``) at prefill.

Each replica has all heads and its own requests. SGLang's Llama does not support it and its Qwen3
does, so the model is a Qwen3 with SmolLM2's weights, whose answers differ from SmolLM2's.
"""

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
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

COPIED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rope_parameters", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
# Weight of the norms of queries and keys, which SmolLM2 lacks.
NORM = 1.5


class AttentionServers(NamedTuple):
    """A prefill server with two replicas, and a decode server."""

    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def qwen(model: Path, folder: Path) -> Path:
    copy = folder / "qwen3"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    smollm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = {name: getattr(smollm.config, name) for name in COPIED}
    qwen = Qwen3ForCausalLM(Qwen3Config(**config, head_dim=smollm.config.head_dim)).float()
    qwen.load_state_dict(smollm.state_dict(), strict=False)
    for layer in qwen.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.constant_(norm.weight, NORM)
    qwen.save_pretrained(copy)
    return copy


@pytest.fixture(scope="module")
def qwen_reference(qwen: Path) -> Reference:
    return Reference(qwen)


@pytest.fixture(scope="module")
def attention(qwen: Path, folder: Path, qwen_reference: Reference) -> Iterator[AttentionServers]:
    stop_all()
    parallel = ("--dp-size", "2", "--enable-dp-attention")
    follow = ("--load-balance-method", "follow_bootstrap_room")
    sides = (
        Side(role="prefill", tp=2, page=16, flags=(*CHUNK, *parallel, *follow), arch="qwen3"),
        Side(role="decode", arch="qwen3"),
    )
    for started in running(sides, qwen, folder):
        yield AttentionServers(*started)


def test_reference_model_gives_an_answer(qwen_reference: Reference) -> None:
    """If its answers were constant, the tests below could not fail."""
    prompts = [qwen_reference.ids(text) for text in (SHORT, LONG)]
    answers = [qwen_reference.answer(prompt, NUM_TOKENS) for prompt in prompts]
    assert len({*answers[0], *answers[1]}) > NUM_TOKENS


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["one chunk", "several chunks"])
def test_room_selects_the_sending_replica(
    attention: AttentionServers, qwen_reference: Reference, replica: int, text: str
) -> None:
    prompt, room = qwen_reference.ids(text), new_room() // 2 * 2 + replica
    answers = generate(prompt, *attention, room=room)
    assert answers.ids == qwen_reference.answer(prompt, NUM_TOKENS)


@pytest.mark.parametrize("replica", [0, 1])
def test_request_selects_the_sending_replica(
    attention: AttentionServers, qwen_reference: Reference, replica: int
) -> None:
    """The request names a replica, and its room id the other one."""
    prompt, room = qwen_reference.ids(LONG), new_room() // 2 * 2 + 1 - replica
    answers = generate(
        prompt,
        *attention,
        room=room,
        at_prefill={"routed_dp_rank": replica},
        disagg_prefill_dp_rank=replica,
    )
    assert answers.ids == qwen_reference.answer(prompt, NUM_TOKENS)
