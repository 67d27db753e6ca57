"""Choosing tokens from logits.

The chance in it is a hash of the request's seed and the token's position: there
is no generator whose state would have to follow a request from engine to engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvferry.serve.steps import Sample, Sampling, Work


def sample(logits: Tensor, works: Sequence[Work]) -> list[Sample]:
    """One token for each work, from its row of ``logits``."""
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    samples = []
    for row, likeliest, work in zip(logits, greedy, works, strict=True):
        assert work.sampling is not None
        token = likeliest
        if work.sampling.temperature > 0:
            token = draw(row, work.sampling, work.end)
        samples.append(_with_logprobs(Sample(work.request, token), row, work.sampling))
    return samples


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """A token by chance, among the likeliest whose probabilities add up to ``top_p``."""
    scaled = logits.double().cpu() / sampling.temperature
    probabilities, tokens = scaled.softmax(dim=-1).sort(descending=True, stable=True)
    reached = probabilities.cumsum(dim=-1)
    # As many as are needed to reach top_p, so at least one.
    num_kept = int((reached < sampling.top_p).sum()) + 1
    reached = reached[:num_kept]
    point = uniform(sampling.seed, position) * reached[-1]
    return int(tokens[torch.searchsorted(reached, point, right=True).clamp(max=len(reached) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number from 0 to below 1 that belongs to one position of one seed."""
    text = f"{seed}:{position}".encode()
    return int.from_bytes(blake2b(text, digest_size=6).digest()) / (1 << 48)


def _with_logprobs(chosen: Sample, logits: Tensor, sampling: Sampling) -> Sample:
    if sampling.logprobs is None:
        return chosen
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(sampling.logprobs, logprobs.shape[-1]))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sample(chosen.request, chosen.token, float(logprobs[chosen.token]), top)
