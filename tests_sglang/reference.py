"""Greedy output of transformers in float32, the reference for all servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A model in the test's process. It caches answers, because many tests use the same prompts."""

    def __init__(self, folder: Path) -> None:
        # More threads would spin on cores that the servers need, and be many times slower.
        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return exactly ``num_tokens`` tokens, each the most likely."""
        key = (*prompt, num_tokens)
        if key not in self._answers:
            self._answers[key] = self._generate(prompt, num_tokens)
        return self._answers[key]

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Decode in a loop, because ``generate`` of transformers stops at the end of text."""
        tokens, cache, answer = torch.tensor([list(prompt)]), None, []
        for _ in range(num_tokens):
            out = self._model(tokens, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, int(out.logits[0, -1].argmax())
            answer.append(token)
            tokens = torch.tensor([[token]])
        return answer
