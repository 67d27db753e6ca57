"""The output of ``kvferry demo``: each answer, its transfer, and the verdict."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.demo.ask import Answer
from kvferry.cli.demo.check import CheckedAnswer
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.reference.cluster.description import ClusterDescription
from kvferry.reference.models.find import ModelFolder

SHOWN_QUESTION = 60


class DemoOutput:
    """Progress and results on standard output; nothing if ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        width = None if sys.stdout.isatty() else 120
        self._console = Console(highlight=False, width=width, quiet=quiet)
        self._began = time.monotonic()

    def step(self, text: str) -> None:
        """Print the next step."""
        seconds = time.monotonic() - self._began
        self._console.print(f"[dim]{seconds:5.1f} s[/]  {escape(text)}", soft_wrap=True)

    def answer(self, number: int, answer: Answer) -> None:
        """Print a complete answer."""
        question = answer.question
        if len(question) > SHOWN_QUESTION:
            question = f"{question[:SHOWN_QUESTION]}…"
        text = _printable(" ".join(answer.text.split())) or f"(no answer: {answer.error})"
        self._console.print(f"[bold]{number + 1}[/]  [cyan]{escape(question)}[/]")
        self._console.print(f"   {escape(text)}")

    def results(self, results: Sequence[CheckedAnswer], document: dict[str, Any]) -> None:
        """Print the transfer of each request, and whether the answers are right."""
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("request", "prompt", "answer", "carried", "cache there", "TTFT"):
            table.add_column(name, justify="right")
        table.add_column("exact")
        for number, result in enumerate(results):
            answer, report = result.answer, result.answer.report
            table.add_row(
                str(number + 1),
                str(answer.usage.get("prompt_tokens", "?")),
                str(len(answer.tokens)),
                human_bytes(report["bytes"]) if "bytes" in report else "-",
                human_seconds(report["seconds"]) if "seconds" in report else "-",
                human_seconds(answer.ttft_s) if answer.ttft_s is not None else "-",
                _mark(result),
            )
        self._console.print()
        self._console.print(table)
        self._console.print(_verdict(results, document), soft_wrap=True)


def _printable(text: str) -> str:
    """Replace characters that control a terminal: a random model may produce any."""
    return "".join(sign if sign.isprintable() else "·" for sign in text)


def _mark(result: CheckedAnswer) -> str:
    if result.exact:
        return "[green]yes[/]"
    if result.answer.error:
        return f"[bold red]no: {escape(result.answer.error)}[/]"
    return f"[bold red]no: token {result.differs_at} differs[/]"


def _verdict(results: Sequence[CheckedAnswer], document: dict[str, Any]) -> str:
    carried = [f"{human_bytes(size)} as {mode}" for mode, size in document["modes"].items()]
    what = escape(
        f"{document['prefill']} → {document['decode']} over {document['transport']}: "
        f"{', '.join(carried) or 'nothing carried'} for {len(results)} requests"
    )
    if document["token_exact"]:
        same = "every token is the same as in a single process"
        return f"\n[bold green]{same}[/]\n{what}, {document['seconds']:.0f} s in all"
    wrong = sum(not result.exact for result in results)
    return f"\n[bold red]{wrong} of {len(results)} answers are wrong[/]\n{what}"


def as_document(
    cluster: ClusterDescription,
    model: ModelFolder,
    results: Sequence[CheckedAnswer],
    modes: dict[str, int],
    seconds: float,
) -> dict[str, Any]:
    """Return the JSON document. ``modes`` has the bytes by transfer mode, ``ttft_s`` the median."""
    requests = [_request(result) for result in results]
    times = [one["ttft_s"] for one in requests if one["ttft_s"] is not None]
    return {
        "model": model.name,
        "prefill": " + ".join(str(section) for section in cluster.prefill),
        "decode": " + ".join(str(section) for section in cluster.decode),
        "transport": cluster.transport,
        "token_exact": bool(results) and all(result.exact for result in results),
        "modes": modes,
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
        **{name: report.get(name) for name in ("source", "bytes", "prefix")},
        "transfer_s": report.get("seconds"),
        "ttft_s": answer.ttft_s,
        "total_s": answer.total_s,
        "error": answer.error or None,
    }
