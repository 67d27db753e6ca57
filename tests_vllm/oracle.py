"""The oracle: the same model in transformers, for where no engine can be asked by itself."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests_vllm.models import plain


def greedy(prompt: str, num_tokens: int) -> str:
    """What the model says next, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(plain())
    model = AutoModelForCausalLM.from_pretrained(plain(), dtype=torch.float32)
    given = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    print(greedy(sys.argv[1], int(sys.argv[2])), end="")
