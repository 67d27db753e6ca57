"""Sampling: choosing tokens from logits.

The chance in it is a hash of the request's seed and the token's position: there
is no generator whose state would have to follow a request from engine to engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvferry.reference.engine.steps import Past, RequestWork, Sample, SampleFailed, Sampling

log = logging.getLogger(__name__)


def sample(logits: Tensor, works: Sequence[RequestWork]) -> tuple[list[Sample], list[SampleFailed]]:
    """Choose one token for each work, from its row of ``logits``.

    An exception while choosing fails that request alone: the batch's other requests,
    and the ranks, have nothing to do with it.
    """
    greedy: list[int] = logits.argmax(dim=-1).tolist()
    finite: list[bool] = logits.isfinite().all(dim=-1).tolist()
    samples, failures = [], []
    for row, likeliest, is_finite, work in zip(logits, greedy, finite, works, strict=True):
        if not is_finite:
            reason = "the model computed logits that are not finite for this prompt"
            failures.append(SampleFailed(work.request, reason))
            continue
        try:
            samples.append(_sample_one(row, likeliest, work))
        except Exception as error:
            log.exception("sampling-failed request=%s", work.request)
            failures.append(SampleFailed(work.request, f"sampling failed: {error}"))
    return samples, failures


def _sample_one(logits: Tensor, likeliest: int, work: RequestWork) -> Sample:
    assert work.sampling is not None
    token = choose(logits, likeliest, work.sampling, work)
    return _with_logprobs(Sample(work.request, token), logits, work.sampling)


def choose(logits: Tensor, likeliest: int, sampling: Sampling, work: RequestWork) -> int:
    """The next token of a work. Log probabilities are told of the model, not of what it became."""
    if work.past is not None:
        logits = penalised(logits, sampling, work.past)
        likeliest = int(logits.argmax())
    return likeliest if sampling.is_greedy else draw(logits, sampling, work.end)


def penalised(logits: Tensor, sampling: Sampling, past: Past) -> Tensor:
    """Logits after what was said before: of prompt and answer for ``repetition_penalty``, which
    scales, and of the answer alone for the other two, which subtract.
    """
    logits = logits.double().cpu().clone()
    said = torch.tensor(sorted({*past.prompt, *past.answer}), dtype=torch.long)
    factor = sampling.repetition_penalty
    before = logits[said]
    logits[said] = torch.where(before > 0, before / factor, before * factor)
    counts = torch.bincount(torch.tensor(past.answer, dtype=torch.long), minlength=len(logits))
    logits -= sampling.frequency_penalty * counts
    logits -= sampling.presence_penalty * (counts > 0)
    return logits


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """A token by chance, among those that ``min_p``, ``top_k`` and ``top_p`` leave."""
    logits = logits.double().cpu()
    # Relative to the maximum, so that a small temperature can't overflow to infinity.
    scaled = (logits - logits.max()) / sampling.temperature
    probabilities, tokens = scaled.softmax(dim=-1).sort(descending=True, stable=True)
    reached = probabilities[: _num_kept(probabilities, sampling)].cumsum(dim=-1)
    # As many as are needed to reach top_p of what the others have left, so at least one.
    reached = reached[: int((reached < sampling.top_p * reached[-1]).sum()) + 1]
    point = uniform(sampling.seed, position) * reached[-1]
    return int(tokens[torch.searchsorted(reached, point, right=True).clamp(max=len(reached) - 1)])


def _num_kept(probabilities: Tensor, sampling: Sampling) -> int:
    """Of tokens from the likeliest down: not below ``min_p`` of the first, at most ``top_k``."""
    num_likely = int((probabilities >= sampling.min_p * probabilities[0]).sum())
    return min(num_likely, sampling.top_k) if sampling.top_k else num_likely


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
