"""Types that pass between an engine, its caller and its ranks.

A ``StepPlan`` is complete: a rank keeps nothing about a request between steps except
what is in its cache, so ranks cannot disagree.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Literal

import msgspec

from kvferry import InputError

MAX_STOPS = 16
# As in vLLM, a smaller temperature means greedy: dividing by it would only lose precision.
MIN_TEMPERATURE = 1e-5


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen.

    The choice depends only on the logits, the seed and the position, so it is the same on
    whichever instance it is made. ``logprobs`` is the number of log-probabilities to report.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = 0

    def __post_init__(self) -> None:
        # NaN fails the comparisons and is refused too.
        if not 0 <= self.temperature <= 2:
            raise InputError(f"temperature must be from 0 to 2, not {self.temperature}")
        if not 0 <= self.top_p <= 1:
            raise InputError(f"top_p must be from 0 to 1, not {self.top_p}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise InputError("seed must be a 64-bit whole number")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < MIN_TEMPERATURE


class EngineRole(StrEnum):
    """Which part of a request an engine computes.

    WHOLE: prompt and answer. PREFILL: the prompt and the first token; the pages stay until
    ``release``. DECODE: the pages are filled by a transfer; decoding begins after ``arrived``.
    """

    WHOLE = auto()
    PREFILL = auto()
    DECODE = auto()


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. The model's end tokens stop it unless ``ignore_end``.

    The last ``answered`` tokens of ``prompt`` are the beginning of the answer, which another
    instance gave. ``max_tokens`` does not count them.
    """

    id: str
    prompt: tuple[int, ...]
    answered: int = 0
    max_tokens: int = 16
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    role: EngineRole = EngineRole.WHOLE

    def __post_init__(self) -> None:
        if self.num_asked < 1:
            raise InputError("the prompt has no tokens; give it at least one")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise InputError(f"stop takes at most {MAX_STOPS} strings, none of them empty")

    @property
    def num_asked(self) -> int:
        """Tokens of the prompt without the answer's beginning."""
        return len(self.prompt) - self.answered

    @property
    def reserved_tokens(self) -> int:
        """Tokens that get pages at admission, so that a running request never lacks one."""
        answer = 0 if self.role is EngineRole.PREFILL else self.max_tokens
        return len(self.prompt) + answer


class RequestWork(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request to run: a chunk of its prompt, or the token it sampled last.

    ``first`` is the position of the first token. ``sampling`` is set if a token is to be
    sampled after the last one.
    """

    request: str
    tokens: list[int]
    first: int
    pages: list[int]
    sampling: Sampling | None

    @property
    def end(self) -> int:
        """One past the position of the last token."""
        return self.first + len(self.tokens)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of every rank. ``commands`` are for the ranks' extensions."""

    works: list[RequestWork] = []
    commands: list[bytes] = []


class Sample(msgspec.Struct, frozen=True):
    """A chosen token. ``top`` has the log-probabilities of the most likely ones if asked for."""

    request: str
    token: int
    top: dict[int, float] = {}


class StepResult(msgspec.Struct, frozen=True):
    """One rank's answer to a plan: samples from rank 0, notes from its extension."""

    samples: list[Sample] = []
    notes: list[bytes] = []


class Admitted(msgspec.Struct, frozen=True):
    """The request has its pages; they already contain the first ``prefix`` tokens."""

    request: str
    pages: list[int]
    prefix: int


# Why an answer ended: a stop token or string, or ``max_tokens``.
FinishReason = Literal["stop", "length"]


class Produced(msgspec.Struct, frozen=True):
    """A new token, and the text that can be shown now (it may lag behind the tokens)."""

    request: str
    sample: Sample
    text: str = ""
    finish: FinishReason | None = None


class SampleFailed(msgspec.Struct, frozen=True):
    """No token could be chosen for this request; other requests of the step are unaffected."""

    request: str


class Noted(msgspec.Struct, frozen=True):
    """A note from one rank's extension."""

    rank: int
    note: bytes


Output = Admitted | Produced | SampleFailed | Noted
