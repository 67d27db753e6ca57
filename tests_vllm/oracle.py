"""Reference answers from the same model in transformers.

Usage: python -m tests_vllm.oracle NUM_TOKENS PROMPT ...; prints a JSON list of answers.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests_vllm.models import plain


def greedy(prompts: list[str], num_tokens: int) -> list[str]:
    """Return the greedy answer to each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(plain())
    model = AutoModelForCausalLM.from_pretrained(plain(), dtype=torch.float32)
    answers = []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
        new = made[0, given["input_ids"].shape[1] :]
        answers.append(str(tokenizer.decode(new, skip_special_tokens=True)))
    return answers


if __name__ == "__main__":
    print(json.dumps(greedy(sys.argv[2:], int(sys.argv[1]))))
