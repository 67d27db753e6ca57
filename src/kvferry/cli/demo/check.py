"""The demo's proof: the same questions in a single process, compared token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvferry.cli.demo.ask import Answer
from kvferry.layout.spec import DType

CACHE_TOKENS = 2048


class CheckedAnswer(NamedTuple):
    """An answer, and the tokens that it should have."""

    answer: Answer
    expected: list[int]

    @property
    def exact(self) -> bool:
        """Whether every token is the same, and there is at least one."""
        return bool(self.expected) and self.answer.tokens == self.expected

    @property
    def differs_at(self) -> int | None:
        """The number of the first token that differs."""
        pairs = zip(self.answer.tokens, self.expected, strict=False)
        differing = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if differing is None and not self.exact:
            return min(len(self.answer.tokens), len(self.expected))
        return differing


def compare(
    folder: Path, answers: Sequence[Answer], max_tokens: int, dtype: DType, device: str = "cpu"
) -> list[CheckedAnswer]:
    """Run every question in this process alone, and pair the answers."""
    # Imports torch, which would delay the start of the demo.
    from kvferry.reference.engine.engine import Engine  # noqa: PLC0415
    from kvferry.reference.engine.requests import EngineRequest, Produced  # noqa: PLC0415
    from kvferry.reference.options import EngineOptions  # noqa: PLC0415

    options = EngineOptions(
        dtype=dtype, device=device, cache_tokens=CACHE_TOKENS, prefix_cache=False
    )
    expected: list[list[int]] = [[] for _ in answers]
    with Engine(folder, options) as engine:
        for number, answer in enumerate(answers):
            prompt = engine.tokenizer.chat([{"role": "user", "content": answer.question}])
            engine.add(EngineRequest(id=str(number), prompt=tuple(prompt), max_tokens=max_tokens))
        while not engine.idle:
            for output in engine.step():
                if isinstance(output, Produced):
                    expected[int(output.request)].append(output.sample.token)
    return [CheckedAnswer(answer, tokens) for answer, tokens in zip(answers, expected, strict=True)]
