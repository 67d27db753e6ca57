"""The proof of a demo: the same questions in a single process, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvferry.cli.demo.ask import Answer
from kvferry.errors import KvferryError
from kvferry.layout.spec import DType
from kvferry.reference.engine.requests import EngineRequest, Produced

if TYPE_CHECKING:
    from kvferry.reference.engine.engine import Engine

CACHE_TOKENS = 2048
MAX_STEPS = 10_000


class CheckedAnswer(NamedTuple):
    """An answer and what it should have been."""

    answer: Answer
    expected: list[int]

    @property
    def exact(self) -> bool:
        """Whether every token is the same, and there is one."""
        return bool(self.expected) and self.answer.tokens == self.expected

    @property
    def differs_at(self) -> int | None:
        """The first token that is not the same."""
        pairs = zip(self.answer.tokens, self.expected, strict=False)
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if same is None and not self.exact:
            return min(len(self.answer.tokens), len(self.expected))
        return same


def compare(
    folder: Path, answers: Sequence[Answer], max_tokens: int, dtype: DType, device: str = "cpu"
) -> list[CheckedAnswer]:
    """Run every question in this process alone, and put both answers side by side."""
    # It takes torch, whose import nobody should have waited for before.
    from kvferry.reference.engine.engine import Engine, EngineOptions  # noqa: PLC0415

    options = EngineOptions(
        dtype=dtype, device=device, cache_tokens=CACHE_TOKENS, prefix_cache=False, threads=1
    )
    with Engine(folder, options) as engine:
        for number, answer in enumerate(answers):
            prompt = engine.tokenizer.chat([{"role": "user", "content": answer.question}])
            engine.add(EngineRequest(id=str(number), prompt=tuple(prompt), max_tokens=max_tokens))
        expected = _run(engine, len(answers))
    return [CheckedAnswer(answer, tokens) for answer, tokens in zip(answers, expected, strict=True)]


def _run(engine: Engine, num_requests: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    for _ in range(MAX_STEPS):
        if engine.idle:
            return tokens
        for output in engine.step():
            if isinstance(output, Produced):
                tokens[int(output.request)].append(output.sample.token)
    raise KvferryError("the single process did not come to an end; please report it")
