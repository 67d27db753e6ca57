"""Prompts as rooms know them: how many tokens, and the digest that tells one from another.

Pure. What SGLang calls a request is read here by its attributes' names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry import digest_of


@dataclass(frozen=True)
class Prompt:
    """What is computed for a request."""

    num_tokens: int
    digest: bytes


def prompt_of(req: Any, *, model: str, dtype: str) -> Prompt:
    """The prompt of one of SGLang's requests, with all that makes caches of equal ids differ."""
    ids = np.asarray(req.origin_input_ids, np.int64)
    adapters = [str(req.lora_id)] if req.lora_id else []
    extra = {
        name: str(value)
        for name, value in (("salt", req.cache_salt), ("key", req.extra_key))
        if value
    }
    for place, number in enumerate(_picture_hashes(req)):
        extra[f"picture {place}"] = str(number)
    digest = digest_of(ids, model=model, dtype=dtype, adapters=adapters, extra=extra)
    return Prompt(len(ids), digest)


def _picture_hashes(req: Any) -> list[int]:
    """Of whatever stands behind placeholders: equal ids, other pictures."""
    inputs = req.multimodal_inputs
    return [] if inputs is None else [item.hash for item in inputs.mm_items if item.hash]
