"""Greedy output of transformers in float32, the reference for all servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """One model in this process. Answers are kept, because many tests ask the same."""

    def __init__(self, folder: Path) -> None:
        # Threads that spin for each other on cores that servers need make it many times slower.
        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Just so many tokens, each the likeliest."""
        key = (*prompt, num_tokens)
        if key not in self._known:
            self._known[key] = self._generate(prompt, num_tokens)
        return self._known[key]

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """A loop of our own: that of transformers leaves the end of text out, or ends with it."""
        asked, past, answer = torch.tensor([list(prompt)]), None, []
        for _ in range(num_tokens):
            out = self._model(asked, past_key_values=past, use_cache=True)
            past, token = out.past_key_values, int(out.logits[0, -1].argmax())
            answer.append(token)
            asked = torch.tensor([[token]])
        return answer
