"""Problems in GSM8K's public form: the file, the shots and questions, the prompts. Pure.

A line is ``{"question": ..., "answer": "... #### 42"}``. Any other line is refused with its
number, because leaving out a problem would change the score.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvferry.cli.eval.score import stated_number
from kvferry.errors import InputError

# The data set has 5 MB; a much larger file is something else.
MAX_BYTES = 64 << 20
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


_LINES = msgspec.json.Decoder(_Line)


def read_problems(name: str) -> tuple[Problem, ...]:
    """Return all problems of a file, in its order, without empty lines."""
    try:
        content = _read(Path(name))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {name!r}: {reason}; check the path") from None
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = tuple(
        _problem(line, number, name) for number, line in enumerate(lines, 1) if line.strip()
    )
    if not found:
        raise InputError(f"{name!r} is empty; give a file with a line {FORM} for each problem")
    return found


def _read(path: Path) -> bytes:
    # Before opening, because opening a pipe waits for a writer, and a device may have no end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{str(path)!r} is not a file; give one with a line {FORM} a problem")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError(f"{str(path)!r} is above {MAX_BYTES >> 20} MiB; check the path")
    return content


def _problem(line: bytes, number: int, name: str) -> Problem:
    where = f"line {number} of {name!r}"
    try:
        found = _LINES.decode(line)
    except msgspec.ValidationError as error:
        raise InputError(f"{where} is not a problem ({error}); it must be {FORM}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({error}); it must be {FORM}") from None
    if not found.question.strip():
        raise InputError(f"{where} has an empty question; it must be {FORM}")
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
    if len(source) < num_shots + (train is None):
        which = "--data" if train is None else "--train"
        more = " and a question to ask" if train is None else ""
        raise InputError(
            f"{num_shots} shots{more} need more than the {len(source)} problems that {which} has; "
            f"lower --shots"
        )
    shots = tuple(source[:num_shots])
    rest = tuple(problems[num_shots:] if train is None else problems)
    if num is not None and num > len(rest):
        behind = f" behind its {num_shots} shots" if train is None and num_shots else ""
        raise InputError(
            f"--num {num} is more than the {len(rest)} questions that --data has{behind}; lower it"
        )
    asked = rest[:num]
    known = {shot.question for shot in shots}
    for problem in asked:
        # A prompt that has the answer measures nothing.
        if problem.question in known:
            raise InputError(
                f"the question in line {problem.line} of --data is also one of the shots, with "
                f"its answer; remove it, or take the shots from another file with --train"
            )
    return Quiz(shots, asked)


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
    messages = []
    for shot in shots:
        messages.append(_user(shot.question))
        messages.append({"role": "assistant", "content": shot.answer})
    return [*messages, _user(question)]


def _user(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}


def request_body(
    shots: Sequence[Problem], question: str, *, chat: bool, model: str, max_tokens: int
) -> dict[str, Any]:
    """Return a greedy, streamed request with only the fields that every server accepts."""
    asked: dict[str, Any]
    if chat:
        asked = {"messages": chat_messages(shots, question)}
    else:
        asked = {"prompt": completion_text(shots, question), "stop": list(STOPS)}
    return {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **asked,
    }
