"""Prompts of one chunk and of several, which fill their last page or not."""

from __future__ import annotations

SHORT = "The capital of France is"
LONG = (
    "Once upon a time there was a little girl who lived in a house by the sea with her grandmother "
    "and a cat. Every morning she went down to the water and looked for shells, and every evening "
    "she told the cat what she had found. One day she found a bottle with a letter in it. The "
    "letter said that"
)
MANY = tuple(
    f"{opening} {subject}"
    for opening in ("Tell me about", "Write one line on", "What do you know of", "In short,")
    for subject in ("the sea", "old trains", "bread", "the moon")
)
