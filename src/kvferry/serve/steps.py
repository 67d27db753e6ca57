"""What one step of an engine is: the plan that every rank gets, and what each answers.

A plan is complete: a rank keeps nothing about a request between steps but what
is in its cache. That is why ranks can't disagree, and why a request can move to
another engine after any step.
"""

from __future__ import annotations

import msgspec

from kvferry.errors import InputError


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. Temperature 0 takes the likeliest.

    The choice depends on the logits, the seed and the position, and on nothing
    that came before, so a request samples the same whoever computes it.
    ``logprobs`` asks for that many alternatives beside the chosen token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise InputError(f"temperature must be from 0 to 100, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise InputError("seed must be a 64-bit whole number")
        if self.logprobs is not None and self.logprobs < 0:
            raise InputError(f"logprobs must be at least 0, not {self.logprobs}")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request to run: a chunk of its prompt, or the token it sampled last.

    ``first`` is the position of the first of them; what is before it is in the
    pages already. ``sampling`` is set where the last one is to be continued.
    """

    request: str
    tokens: list[int]
    first: int
    pages: list[int]
    row: int | None
    sampling: Sampling | None

    @property
    def end(self) -> int:
        """One past the position of the last token."""
        return self.first + len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``commands`` are for the ranks' extensions; the engine does not read them."""

    works: list[Work] = []
    commands: list[bytes] = []


class Sample(msgspec.Struct, frozen=True):
    """A chosen token. ``top`` has (token, logprob) of the likeliest, where it was asked for."""

    request: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """One rank's answer: samples from the lead, and what its extension has to say."""

    samples: list[Sample] = []
    notes: list[bytes] = []
