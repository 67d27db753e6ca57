"""Random prompts, in the forms that endpoints accept. Pure.

A prompt is random from its first token on, so that no prefix cache shortens the measurement.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Any, NamedTuple

from kvferry.cli.load.client import CHAT, COMPLETIONS

# Token ids of nearly every vocabulary, and of the smallest ones; no special tokens.
WIDE, NARROW = range(1000, 30_000), range(32, 250)
# One token each in most tokenizers.
WORDS = (
    "water river boat ship bank sea wind rain sun sky north south east west road city town house "
    "door room table chair window wall garden tree leaf flower stone sand gold iron wood paper"
)


class PromptKind(StrEnum):
    """The content of a prompt."""

    IDS = "token ids"
    SMALL_IDS = "token ids below 250"
    TEXT = "text"
    CHAT = "chat"


class PromptForm(NamedTuple):
    """The form of a request; ``exact`` adds ``ignore_eos``, an extension of OpenAI's API."""

    kind: PromptKind
    exact: bool

    @property
    def path(self) -> str:
        """The path for requests of this form."""
        return CHAT if self.kind is PromptKind.CHAT else COMPLETIONS

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.exact else ', without ignore_eos'}"


# Tried in turn until the endpoint accepts one.
FORMS = tuple(PromptForm(kind, exact) for exact in (True, False) for kind in PromptKind)


class PromptGenerator:
    """Makes the request bodies of a run, no two of them alike."""

    def __init__(self, model: str, input_tokens: int, output_tokens: int, seed: int) -> None:
        self._common = streamed(model, output_tokens)
        self._input_tokens = input_tokens
        self._random = random.Random(seed)

    def body(self, form: PromptForm) -> dict[str, Any]:
        """Return the next request body."""
        # A token without text of its own still has an id.
        exact = {"ignore_eos": True, "return_token_ids": True} if form.exact else {}
        return self._common | exact | self._prompt(form.kind)

    def _prompt(self, kind: PromptKind) -> dict[str, Any]:
        if kind in (PromptKind.IDS, PromptKind.SMALL_IDS):
            ids = WIDE if kind is PromptKind.IDS else NARROW
            return {"prompt": self._random.choices(ids, k=self._input_tokens)}
        text = " ".join(self._random.choices(WORDS.split(), k=self._input_tokens))
        if kind is PromptKind.TEXT:
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}


def streamed(model: str, max_tokens: int) -> dict[str, Any]:
    """Return the common part of greedy, streamed requests: fields that every server accepts."""
    return {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
