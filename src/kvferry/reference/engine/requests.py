"""Requests: what a caller asks of an engine, and what an engine tells its caller."""

from __future__ import annotations

from enum import StrEnum, auto

import msgspec

from kvferry import InputError
from kvferry.reference.engine.steps import Sample, SampleFailed, Sampling

MAX_STOPS = 16


class EngineRole(StrEnum):
    """Which part of a request this engine computes.

    WHOLE: prompt and answer. PREFILL: the prompt and the first token; its pages
    stay until ``release``. DECODE: the prompt's cache comes from elsewhere into
    pages that the engine reserves; it goes on after ``arrived``.
    """

    WHOLE = auto()
    PREFILL = auto()
    DECODE = auto()


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. ``stop`` are strings, ``stop_tokens`` ids.

    The model's own end tokens stop a request too, unless ``ignore_end``.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int = 16
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_end: bool = False
    role: EngineRole = EngineRole.WHOLE

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt has no tokens; give it at least one")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise InputError(f"stop takes at most {MAX_STOPS} strings, none of them empty")

    @property
    def reserved_tokens(self) -> int:
        """Tokens whose cache must have room from the start, so that it never runs out of it."""
        answer = 0 if self.role is EngineRole.PREFILL else self.max_tokens
        return len(self.prompt) + answer


class FinishReason(StrEnum):
    """Why an answer ended: a stop token or string, or ``max_tokens``."""

    STOP = auto()
    LENGTH = auto()


class Admitted(msgspec.Struct, frozen=True):
    """The request has its pages. The first ``prefix`` tokens are in them already."""

    request: str
    pages: list[int]
    row: int | None
    prefix: int


class Computed(msgspec.Struct, frozen=True):
    """Every layer of these prompt tokens is in the request's pages, on every rank."""

    request: str
    first: int
    end: int


class Produced(msgspec.Struct, frozen=True):
    """A new token, and the text that can be shown now (it may lag behind the tokens)."""

    request: str
    sample: Sample
    text: str = ""
    finish: FinishReason | None = None


class Noted(msgspec.Struct, frozen=True):
    """What a rank's extension has to say."""

    rank: int
    note: bytes


Output = Admitted | Computed | Produced | SampleFailed | Noted
