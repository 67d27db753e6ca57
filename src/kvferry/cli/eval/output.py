"""The output of ``kvferry eval``: a bar while questions are asked, a log of each, the score."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvferry.cli.eval.results import QuestionOutcome, SharedReason, Tally
from kvferry.cli.eval.run import EvalWatcher
from kvferry.cli.eval.score import standard_error
from kvferry.cli.parsing import one_line, show_path
from kvferry.errors import InputError
from kvferry.plan.units import human_seconds

SHOWN_LINES = 10
SHOWN_FAILURES = 5


class AnswerLog(EvalWatcher):
    """All outcomes so far: on the bar, in the log, and here."""

    def __init__(self, num_questions: int, open_log: Callable[[], IO[bytes]]) -> None:
        self.outcomes: list[QuestionOutcome] = []
        self.model = ""
        self.log_name = ""
        self._open_log = open_log
        self._log: IO[bytes] | None = None
        self._num_questions, self._num_right, self._num_failed = num_questions, 0, 0
        self._began = self._ended = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        # Without a total it is drawn as waiting.
        self._task = self._bar.add_task("waiting for the endpoint", total=None, score="")

    def __enter__(self) -> AnswerLog:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()
        if self._log is not None:
            # What could not be written was told when it was; closing tries it once more.
            with contextlib.suppress(OSError):
                self._log.close()

    @property
    def has_begun(self) -> bool:
        """Whether a question was asked."""
        return self._log is not None

    @property
    def seconds(self) -> float:
        """From the first question to the last answer."""
        return self._ended - self._began

    def begins(self, model: str) -> None:
        """Only now is there something to log."""
        self.model = model
        self._log = self._open_log()
        self.log_name = self._log.name
        self._began = self._ended = time.monotonic()
        self._bar.update(self._task, description="gsm8k", total=self._num_questions)

    def ended(self, outcome: QuestionOutcome) -> None:
        """Into the log first, and at once, so that nothing that was answered can be lost."""
        self._write(msgspec.json.encode(outcome) + b"\n")
        self.outcomes.append(outcome)
        self._ended = time.monotonic()
        self._num_right += outcome.right is True
        self._num_failed += outcome.right is None
        self._bar.update(self._task, advance=1, score=self._running())

    def _write(self, line: bytes) -> None:
        assert self._log is not None
        try:
            self._log.write(line)
            self._log.flush()
        except OSError as error:
            raise InputError(
                f"cannot write the log {show_path(self.log_name)}: {error.strerror}; "
                f"it has the first {len(self.outcomes)} answers, choose another with --log"
            ) from None

    def _running(self) -> str:
        answered = len(self.outcomes) - self._num_failed
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"score {_score(self._num_right, answered)}{failed}"


def open_log(name: str | None) -> IO[bytes]:
    """The file that the user named, replaced if it is there; else a new one in this folder."""
    path = Path(name or time.strftime("gsm8k-%Y%m%d-%H%M%S.jsonl"))
    try:
        return path.open("wb" if name else "xb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot write the log {show_path(path)}: {reason}; name another with --log"
        ) from None


# ---------------------------------------------------------------- the end


def as_document(totals: Tally, setting: Mapping[str, Any]) -> dict[str, Any]:
    """For programs: how it was run, and what came of it."""
    return {"eval": "gsm8k", **setting, **msgspec.to_builtins(totals)}


def report(totals: Tally, setting: Mapping[str, Any]) -> str:
    """For people."""
    rows = [("score", _score(totals.right, totals.answered) + _meaning(totals))]
    if totals.latency_s is not None:
        p50, p99 = human_seconds(totals.latency_s.p50), human_seconds(totals.latency_s.p99)
        rows.append(("latency", f"p50 {p50}, p99 {p99}"))
    rows.append(("output", _output(totals, setting)))
    if totals.cut:
        rows.append(("cut", f"{_num(totals.cut, 'answer')} at {setting['max_tokens']} tokens"))
    if totals.no_number:
        rows.append(("no number", f"{_num(totals.no_number, 'answer')}, counted as wrong"))
    if totals.failed:
        rows.append(("failed", f"{totals.failed} of {totals.asked}, which the score leaves out"))
        rows += [("", _named(failure)) for failure in totals.failures[:SHOWN_FAILURES]]
    rows.append(("log", setting["log"]))
    if setting["interrupted"]:
        rows.append(("interrupted", f"{totals.asked} of {setting['num']} questions have ended"))
    heading = f"gsm8k, {_num(setting['shots'], 'shot')}: {setting['model']} at {setting['url']}"
    lines = [heading, *(f"  {name:12}{text}" for name, text in rows)]
    return "\n".join(_printable(line) for line in lines)


def _num(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _score(num_right: int, num_answered: int) -> str:
    if not num_answered:
        return "unknown"
    p, error = num_right / num_answered, standard_error(num_right, num_answered)
    return f"{p:.3f} ± {error:.3f}"


def _meaning(totals: Tally) -> str:
    if not totals.answered:
        return ", because no question was answered"
    return (
        f"  ({totals.right} of {totals.answered} right; "
        f"± is the standard error of the mean, sqrt(p(1-p)/n))"
    )


def _output(totals: Tally, setting: Mapping[str, Any]) -> str:
    return (
        f"{totals.output_tokens:,} tokens, {totals.output_tokens_per_s:.1f} tokens/s, "
        f"{human_seconds(totals.seconds)} in all, {setting['concurrency']} at once"
    )


def _named(failure: SharedReason) -> str:
    shown = ", ".join(str(line) for line in failure.lines[:SHOWN_LINES])
    more = ", …" if len(failure.lines) > SHOWN_LINES else ""
    word = "line" if len(failure.lines) == 1 else "lines"
    return f"{word} {shown}{more}: {one_line(failure.reason)}"


def _printable(line: str) -> str:
    """Without what would move a terminal's cursor: a server's error may say anything."""
    return "".join(sign if sign.isprintable() else "·" for sign in line)
