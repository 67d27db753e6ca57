"""Token sampling from logits.

Randomness is a hash of the request's seed and the token's position, so no generator state
has to follow a request from one instance to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvferry.reference.engine.requests import RequestWork, Sample, Sampling


def sample(logits: Tensor, works: Sequence[RequestWork]) -> list[Sample]:
    """Choose one token for each work from its row of ``logits``; none if they are not finite."""
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    finite: list[bool] = logits.isfinite().all(dim=-1).tolist()
    samples = []
    for row, token, is_finite, work in zip(logits, greedy, finite, works, strict=True):
        sampling = work.sampling
        assert sampling is not None
        if is_finite:
            chosen = token if sampling.is_greedy else draw(row, sampling, work.end)
            top = _top(row, sampling.logprobs) if sampling.logprobs else {}
            samples.append(Sample(work.request, chosen, top))
    return samples


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Draw a token from the smallest set of tokens whose probabilities reach ``top_p``."""
    logits = logits.double().cpu()
    # Relative to the maximum, so that a small temperature cannot overflow.
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities, tokens = scaled.softmax(dim=-1).sort(descending=True, stable=True)
    reached = probabilities.cumsum(dim=-1)
    reached = reached[: int((reached < sampling.top_p * reached[-1]).sum()) + 1]
    text = f"{sampling.seed}:{position}".encode()
    uniform = int.from_bytes(blake2b(text, digest_size=6).digest()) / (1 << 48)
    point = uniform * reached[-1]
    return int(tokens[torch.searchsorted(reached, point, right=True).clamp(max=len(reached) - 1)])


def _top(logits: Tensor, number: int) -> dict[int, float]:
    values, tokens = logits.float().log_softmax(dim=-1).topk(min(number, len(logits)))
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))
