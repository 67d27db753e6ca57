"""Problems in GSM8K's public form: the file, the shots and questions, the prompts. Pure.

A line is ``{"question": ..., "answer": "... #### 42"}``. Any other line is refused with its
number, because leaving out a problem would change the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvferry.cli.eval.numbers import stated_number
from kvferry.errors import InputError

FORM = '{"question": "...", "answer": "... #### 42"}'


class Problem(msgspec.Struct, frozen=True):
    """A question, its worked answer from the file, and the right number.

    ``line`` counts from 1, as editors do.
    """

    line: int
    question: str
    answer: str
    expected: Decimal


class Quiz(NamedTuple):
    """The worked examples of every prompt, and the questions to ask."""

    shots: tuple[Problem, ...]
    questions: tuple[Problem, ...]


class _Line(msgspec.Struct, frozen=True):
    question: str
    answer: str


def read_problems(name: str) -> tuple[Problem, ...]:
    """Return all problems of a file, in its order, without empty lines."""
    try:
        # Not splitlines, which also splits at line separators inside a text.
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {name!r}: {reason}; check the path") from None
    found = tuple(
        _problem(line, number, name) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not found:
        raise InputError(f"{name!r} is empty; give a file with a line {FORM} for each problem")
    return found


def _problem(line: str, number: int, name: str) -> Problem:
    where = f"line {number} of {name!r}"
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{where} is not a problem ({error}); it must be {FORM}") from None
    expected = stated_number(found.answer)
    if expected is None:
        raise InputError(f"{where}: the answer does not end in '#### ' and a number, as in {FORM}")
    return Problem(number, found.question.strip(), found.answer.strip(), expected)


def make_quiz(
    problems: Sequence[Problem],
    *,
    num_shots: int,
    num: int | None = None,
    train: Sequence[Problem] | None = None,
) -> Quiz:
    """Return the first ``num_shots`` problems as shots and the rest as questions.

    With ``train`` the shots are its first problems, and all of ``problems`` are questions. Only
    the first ``num`` questions are asked; None means all.
    """
    source = problems if train is None else train
    shots = tuple(source[:num_shots])
    rest = tuple(problems[num_shots:] if train is None else problems)
    if len(shots) < num_shots or not rest:
        raise InputError(
            f"{num_shots} shots and a question to ask are more than the {len(source)} problems of "
            f"{'--data' if train is None else '--train'}; lower --shots"
        )
    if num is not None and num > len(rest):
        raise InputError(
            f"--num {num} is more than the {len(rest)} questions that --data has without the "
            f"shots; lower it"
        )
    known = {shot.question for shot in shots}
    for problem in rest[:num]:
        # A prompt that has the answer measures nothing.
        if problem.question in known:
            raise InputError(
                f"the question in line {problem.line} of --data is also one of the shots, with "
                f"its answer; remove it, or take the shots from another file with --train"
            )
    return Quiz(shots, rest[:num])


# ---------------------------------------------------------------- prompts

# A base model continues with another question after its answer.
STOPS = ("Question:",)
# In every user turn, because some chat templates refuse a system message.
INSTRUCTION = "Think step by step. End with a line that has #### and then only the number."


def completion_text(shots: Sequence[Problem], question: str) -> str:
    """Return the few-shot prompt of a completion."""
    worked = (f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{''.join(worked)}Question: {question}\nAnswer:"


def chat_messages(shots: Sequence[Problem], question: str) -> list[dict[str, str]]:
    """Return the conversation: a user turn and an assistant turn for each shot."""
    turns = [(shot.question, shot.answer) for shot in shots] + [(question, "")]
    return [
        {"role": role, "content": content}
        for asked, answer in turns
        for role, content in (("user", f"{asked}\n\n{INSTRUCTION}"), ("assistant", answer))
        if content
    ]


def prompt_of(shots: Sequence[Problem], question: str, *, chat: bool) -> dict[str, Any]:
    """Return the prompt's fields of a request body."""
    if chat:
        return {"messages": chat_messages(shots, question)}
    return {"prompt": completion_text(shots, question), "stop": list(STOPS)}
