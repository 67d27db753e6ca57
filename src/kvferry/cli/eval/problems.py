"""Problems in GSM8K's public form, one a line, and their split into shots and questions.

A line is ``{"question": ..., "answer": "... #### 42"}``. What is not so is refused with the
number of its line, because a problem that is quietly left out would change the score.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvferry.cli.eval.score import stated_number
from kvferry.errors import InputError

# The whole data set has 5 MB. What is much larger is something else.
MAX_BYTES = 64 << 20
FORM = '{"question": "...", "answer": "... #### 42"}'


class Problem(msgspec.Struct, frozen=True):
    """A question, its worked answer as the file has it, and the number that is right.

    ``line`` counts from 1, as editors do.
    """

    line: int
    question: str
    answer: str
    expected: Decimal


class Quiz(NamedTuple):
    """Worked examples that stand in every prompt, and the questions that are asked."""

    shots: tuple[Problem, ...]
    questions: tuple[Problem, ...]


class _Line(msgspec.Struct, frozen=True):
    question: str
    answer: str


_LINES = msgspec.json.Decoder(_Line)


def read_problems(name: str) -> tuple[Problem, ...]:
    """All problems of a file, in its order. Empty lines are passed over."""
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
    # Asked before opening: opening a pipe waits for a writer, and a device may never end.
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
        told = _LINES.decode(line)
    except msgspec.ValidationError as error:
        raise InputError(f"{where} is not a problem ({error}); it must be {FORM}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({error}); it must be {FORM}") from None
    if not told.question.strip():
        raise InputError(f"{where} has an empty question; it must be {FORM}")
    expected = stated_number(told.answer)
    if expected is None:
        raise InputError(f"{where}: the answer does not end in '#### ' and a number, as in {FORM}")
    return Problem(number, told.question.strip(), told.answer.strip(), expected)


def make_quiz(
    problems: Sequence[Problem],
    *,
    num_shots: int,
    num: int | None = None,
    train: Sequence[Problem] | None = None,
) -> Quiz:
    """The first ``num_shots`` problems become shots; those behind them are asked.

    With ``train`` the shots are its first ones, and all of ``problems`` may be asked. ``num`` is
    how many are asked, from the first on; None means all.
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
    _demand_apart(shots, asked)
    return Quiz(shots, asked)


def _demand_apart(shots: Sequence[Problem], asked: Sequence[Problem]) -> None:
    """A question whose answer stands in the prompt measures nothing."""
    known = {shot.question for shot in shots}
    for problem in asked:
        if problem.question in known:
            raise InputError(
                f"the question in line {problem.line} of --data is also one of the shots, with "
                f"its answer; remove it, or take the shots from another file with --train"
            )
