"""The output of ``kvferry demo``: answers as they grow, then what travelled, then the verdict."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvferry.cli.demo.ask import Answer
from kvferry.cli.demo.check import CheckedAnswer
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.reference.cluster.description import ClusterDescription, ModelFolder

SHOWN_QUESTION = 60


class Show:
    """The screen, or a pipe, or nothing where a program listens."""

    def __init__(self, *, quiet: bool) -> None:
        is_terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, width=None if is_terminal else 120, quiet=quiet)
        self._began = time.monotonic()
        self._live: Live | None = None
        if is_terminal and not quiet:
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop_live()

    def _stop_live(self) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def says(self, text: str) -> None:
        """A step begins."""
        self._stop_live()
        seconds = time.monotonic() - self._began
        self._console.print(f"[dim]{seconds:5.1f} s[/]  {escape(text)}", soft_wrap=True)

    def is_ready(self, name: str, url: str) -> None:
        """A part has started."""
        self.says(f"{name} is ready on {url}")

    # ------------------------------------------------------------ while answers grow

    def grew(self, answers: Sequence[Answer]) -> None:
        """Draw all answers anew; in a pipe each is printed when it is complete."""
        if self._live is None:
            return
        if not self._live.is_started:
            self._live.start()
        table = Table(show_header=False, box=None, padding=(0, 1))
        for number, answer in enumerate(answers):
            table.add_row(f"[bold]{number + 1}[/]", f"[cyan]{_question(answer)}[/]")
            table.add_row("", escape(_printable(answer.text) or "…"))
        self._live.update(table, refresh=True)

    def ended(self, number: int, answer: Answer) -> None:
        """Print a complete answer, unless it is on the screen already."""
        if self._live is None:
            self._console.print(f"[bold]{number + 1}[/]  [cyan]{_question(answer)}[/]")
            text = _printable(" ".join(answer.text.split())) or f"(no answer: {answer.error})"
            self._console.print(f"   {escape(text)}")

    # ------------------------------------------------------------ the end

    def results(self, results: Sequence[CheckedAnswer], document: dict[str, Any]) -> None:
        """What travelled for each request, and whether the answers are right."""
        self._stop_live()
        self._console.print()
        self._console.print(_travelled(results))
        self._console.print(_verdict(results, document), soft_wrap=True)


def _question(answer: Answer) -> str:
    text = answer.question
    return escape(text if len(text) <= SHOWN_QUESTION else f"{text[:SHOWN_QUESTION]}…")


def _printable(text: str) -> str:
    """Without what would move a terminal's cursor: a random model says anything."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "·" for sign in text)


def _travelled(results: Sequence[CheckedAnswer]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("request", "prompt", "answer", "carried", "mode", "cache there", "TTFT", "exact"):
        table.add_column(name, justify="left" if name in ("mode", "exact") else "right")
    for number, result in enumerate(results):
        answer, report = result.answer, result.answer.report
        table.add_row(
            str(number + 1),
            str(answer.usage.get("prompt_tokens", "?")),
            str(len(answer.tokens)),
            human_bytes(report["bytes"]) if "bytes" in report else "-",
            str(report.get("mode") or "-"),
            human_seconds(report["seconds"]) if "seconds" in report else "-",
            human_seconds(answer.ttft_s) if answer.ttft_s is not None else "-",
            _mark(result),
        )
    return table


def _mark(result: CheckedAnswer) -> str:
    if result.exact:
        return "[green]yes[/]"
    if result.answer.error:
        return f"[bold red]no: {escape(result.answer.error)}[/]"
    return f"[bold red]no: token {result.differs_at} differs[/]"


def _verdict(results: Sequence[CheckedAnswer], document: dict[str, Any]) -> str:
    what = (
        f"{document['prefill']} → {document['decode']} over {document['transport']}: "
        f"{human_bytes(document['bytes'])} for {len(results)} requests"
    )
    if document["token_exact"]:
        same = "every token is the same as in a single process"
        return f"\n[bold green]{same}[/]\n{escape(what)}, {document['seconds']:.0f} s in all"
    wrong = sum(not result.exact for result in results)
    return f"\n[bold red]{wrong} of {len(results)} answers are wrong[/]\n{escape(what)}"


def as_document(
    cluster: ClusterDescription,
    model: ModelFolder,
    results: Sequence[CheckedAnswer],
    seconds: float,
) -> dict[str, Any]:
    """The same for programs. ``mode`` and ``ttft_s`` of the whole: all modes, and the median."""
    requests = [_request(result) for result in results]
    times = [one["ttft_s"] for one in requests if one["ttft_s"] is not None]
    return {
        "model": model.name,
        "prefill": " + ".join(str(section) for section in cluster.prefill),
        "decode": " + ".join(str(section) for section in cluster.decode),
        "transport": cluster.transport,
        "token_exact": bool(results) and all(result.exact for result in results),
        "mode": ", ".join(sorted({one["mode"] for one in requests if one["mode"]})),
        "bytes": sum(one["bytes"] or 0 for one in requests),
        "ttft_s": statistics.median(times) if times else None,
        "seconds": seconds,
        "requests": requests,
    }


def _request(result: CheckedAnswer) -> dict[str, Any]:
    answer, report = result.answer, result.answer.report
    return {
        "question": answer.question,
        "answer": answer.text,
        "prompt_tokens": answer.usage.get("prompt_tokens"),
        "tokens": answer.tokens,
        "token_exact": result.exact,
        "differs_at": result.differs_at,
        "source": report.get("source"),
        "mode": report.get("mode"),
        "bytes": report.get("bytes"),
        "prefix": report.get("prefix"),
        "transfer_s": report.get("seconds"),
        "ttft_s": answer.ttft_s,
        "total_s": answer.total_s,
        "error": answer.error or None,
    }
