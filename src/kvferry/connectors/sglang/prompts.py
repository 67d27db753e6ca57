"""Prompts of SGLang's requests: number of tokens and digest. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry import digest_of


@dataclass(frozen=True)
class Prompt:
    """Length and digest of a prompt."""

    num_tokens: int
    digest: bytes


def prompt_of(req: Any, *, model: str, dtype: str) -> Prompt:
    """Return a request's prompt. The digest covers all that affects its cache."""
    ids = np.asarray(req.origin_input_ids, np.int64)
    adapters = [str(req.lora_id)] if req.lora_id else []
    extra = {
        name: str(value)
        for name, value in (("salt", req.cache_salt), ("key", req.extra_key))
        if value
    }
    for i, number in enumerate(_media_hashes(req)):
        extra[f"picture {i}"] = str(number)
    digest = digest_of(ids, model=model, dtype=dtype, adapters=adapters, extra=extra)
    return Prompt(len(ids), digest)


def _media_hashes(req: Any) -> list[int]:
    """Return the hashes of images and other media behind placeholder tokens."""
    inputs = req.multimodal_inputs
    return [] if inputs is None else [item.hash for item in inputs.mm_items if item.hash]
