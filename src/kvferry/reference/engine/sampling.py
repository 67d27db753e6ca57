"""Token sampling from logits.

Randomness is a hash of the request's seed and the token's position, so no generator state
has to follow a request from one instance to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvferry.reference.engine.requests import RequestWork, Sample, SampleFailed, Sampling


def sample(logits: Tensor, works: Sequence[RequestWork]) -> tuple[list[Sample], list[SampleFailed]]:
    """Choose one token for each work from its row of ``logits``.

    Logits that are not finite fail that request alone.
    """
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    finite: list[bool] = logits.isfinite().all(dim=-1).tolist()
    samples, failures = [], []
    for row, likeliest, is_finite, work in zip(logits, greedy, finite, works, strict=True):
        assert work.sampling is not None
        if not is_finite:
            reason = "the model computed logits that are not finite for this prompt"
            failures.append(SampleFailed(work.request, reason))
            continue
        is_greedy = work.sampling.is_greedy
        token = likeliest if is_greedy else draw(row, work.sampling, work.end)
        samples.append(_with_logprobs(Sample(work.request, token), row, work.sampling))
    return samples, failures


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Draw a token from the smallest set of tokens whose probabilities reach ``top_p``."""
    logits = logits.double().cpu()
    # Relative to the maximum, so that a small temperature cannot overflow.
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities, tokens = scaled.softmax(dim=-1).sort(descending=True, stable=True)
    reached = probabilities.cumsum(dim=-1)
    reached = reached[: int((reached < sampling.top_p * reached[-1]).sum()) + 1]
    point = uniform(sampling.seed, position) * reached[-1]
    return int(tokens[torch.searchsorted(reached, point, right=True).clamp(max=len(reached) - 1)])


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the seed and the position."""
    text = f"{seed}:{position}".encode()
    return int.from_bytes(blake2b(text, digest_size=6).digest()) / (1 << 48)


def _with_logprobs(chosen: Sample, logits: Tensor, sampling: Sampling) -> Sample:
    if sampling.logprobs is None:
        return chosen
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(sampling.logprobs, logprobs.shape[-1]))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sample(chosen.request, chosen.token, float(logprobs[chosen.token]), top)
