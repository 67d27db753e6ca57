"""A step of an engine: the plan that every rank gets, and what each answers.

A plan is complete: a rank keeps nothing about a request between steps but what
is in its cache. That is why ranks can't disagree, and why a request can move to
another engine after any step.
"""

from __future__ import annotations

import msgspec

from kvferry import InputError

# As in vLLM, a smaller temperature means greedy: dividing by it would only lose precision.
MIN_TEMPERATURE = 1e-5


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. A temperature below ``MIN_TEMPERATURE`` is greedy.

    The ranges are those that OpenAI documents; ``repetition_penalty``, ``top_k`` and
    ``min_p`` are vLLM's.

    The choice depends on the logits, the seed and the position, so a request samples
    the same whoever computes it. With a penalty it also depends on the tokens that
    came before, which the plan then carries (``Past``). ``top_k`` 0 means all.
    ``logprobs`` asks for that many alternatives beside the chosen token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _demand_range("temperature", self.temperature, 0, 2)
        _demand_range("top_p", self.top_p, 0, 1)
        _demand_range("min_p", self.min_p, 0, 1)
        _demand_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _demand_range("presence_penalty", self.presence_penalty, -2, 2)
        _demand_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.top_k < 0:
            raise InputError(f"top_k must be at least 0, which means all, not {self.top_k}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise InputError("seed must be a 64-bit whole number")
        if self.logprobs is not None and self.logprobs < 0:
            raise InputError(f"logprobs must be at least 0, not {self.logprobs}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        subtracted = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(subtracted)


def _demand_range(name: str, value: float, least: float, most: float) -> None:
    # NaN fails the comparison and is refused too.
    if not least <= value <= most:
        raise InputError(f"{name} must be from {least} to {most}, not {value}")


class Past(msgspec.Struct, frozen=True):
    """The tokens before the one that is to be chosen."""

    prompt: list[int] = []
    answer: list[int] = []


class RequestWork(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request to run: a chunk of its prompt, or the token it sampled last.

    ``first`` is the position of the first of them; what is before it is in the
    pages already. ``sampling`` is set where the last one is to be continued, and
    ``past`` where it looks back.
    """

    request: str
    tokens: list[int]
    first: int
    pages: list[int]
    row: int | None
    sampling: Sampling | None
    past: Past | None = None

    @property
    def end(self) -> int:
        """One past the position of the last token."""
        return self.first + len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``commands`` are for the ranks' extensions; the engine does not read them."""

    works: list[RequestWork] = []
    commands: list[bytes] = []


class Sample(msgspec.Struct, frozen=True):
    """A chosen token. ``top`` has (token, logprob) of the likeliest, where it was asked for."""

    request: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class SampleFailed(msgspec.Struct, frozen=True):
    """No token could be chosen for a request; the other requests of the step have theirs."""

    request: str
    reason: str


class StepResult(msgspec.Struct, frozen=True):
    """One rank's answer: samples from the lead, and what its extension has to say."""

    samples: list[Sample] = []
    failures: list[SampleFailed] = []
    notes: list[bytes] = []
