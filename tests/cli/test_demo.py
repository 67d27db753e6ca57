"""``kvferry demo``: what it shows, and that its proof can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.cli.demo.ask import Answer
from kvferry.cli.demo.check import CheckedAnswer, compare
from kvferry.cli.demo.output import DemoOutput, as_document
from kvferry.cli.main import main
from kvferry.layout.spec import DType
from kvferry.reference.cluster.description import ClusterDescription, WorkerSection
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.models.tiny import make_tiny

ENOUGH_S = 240
CLUSTER = ClusterDescription(prefill=(WorkerSection(tp=3),), decode=(WorkerSection(),))


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", "--tiny", *words],
        capture_output=True,
        text=True,
        timeout=ENOUGH_S,
        check=False,
    )


def test_every_token_is_that_of_a_single_process() -> None:
    done = demo("--decode", "tp=1,page=32", "--tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    document = json.loads(line)
    assert document["token_exact"] is True
    assert (document["transport"], document["model"]) == ("auto", "tiny")
    assert (document["prefill"], document["decode"]) == ("TP3, page 16", "TP1, page 32")
    requests = document["requests"]
    assert len(requests) == 5
    assert document["bytes"] == sum(request["bytes"] for request in requests) > 0
    assert sum(document["modes"].values()) == document["bytes"]
    assert set(document["modes"]) <= {"runs", "slices"}
    assert document["ttft_s"] > 0
    for request in requests:
        assert request["token_exact"] is True
        assert request["source"] == "transferred"
        assert len(request["tokens"]) <= 8
        assert request["ttft_s"] > 0


def test_bad_input_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["--prefill", "tp=4"], "tp=4 neither divides nor is divided by"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--model", "x"], "--tiny is a model already"),
    ):
        assert main(["demo", "--tiny", *words]) == 2
        err = capsys.readouterr().err
        assert sentence in err
        assert "Traceback" not in err


# ---------------------------------------------------------------- the proof


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def right(folder: Path, questions: Sequence[str]) -> list[Answer]:
    """The answers of a cluster that works."""
    asked = compare(folder, [Answer(question) for question in questions], 6, DType.FLOAT32)
    return [Answer(one.answer.question, tokens=list(one.expected)) for one in asked]


def test_a_single_wrong_token_is_found(folder: Path) -> None:
    answers = right(folder, ["one", "two", "three"])
    answers[1].tokens[3] += 1
    results = compare(folder, answers, 6, DType.FLOAT32)
    assert [result.exact for result in results] == [True, False, True]
    assert [result.differs_at for result in results] == [None, 3, None]
    document = as_document(CLUSTER, ModelFolder(folder, "m"), results, {}, 1.0)
    assert document["token_exact"] is False


@pytest.mark.parametrize(
    ("tokens", "at"), [([1, 2, 3], None), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0), ([2, 2, 3], 0)]
)
def test_an_answer_that_is_too_short_or_too_long_is_wrong(tokens: list[int], at: int) -> None:
    result = CheckedAnswer(Answer("q", tokens=tokens), [1, 2, 3])
    assert (result.exact, result.differs_at) == (at is None, at)


def test_nothing_is_not_exact() -> None:
    """No answer where none was expected proves nothing."""
    assert not CheckedAnswer(Answer("q"), []).exact
    assert as_document(CLUSTER, ModelFolder(Path("x"), "m"), [], {}, 1.0)["token_exact"] is False


def test_what_it_prints_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    good = Answer("why?", text="\x1b[2Jbecause", tokens=[1, 2], stamps=[0.25], total_s=1.0)
    good.report = {"bytes": 2048, "seconds": 0.1}
    lost = Answer("how?", error="the worker is gone")
    results = [CheckedAnswer(good, [1, 2]), CheckedAnswer(lost, [1])]
    output = DemoOutput(quiet=False)
    output.step("asking")
    for number, result in enumerate(results):
        output.answer(number, result.answer)
    document = as_document(CLUSTER, ModelFolder(Path("x"), "m"), results, {"runs": 2048}, 1.0)
    output.results(results, document)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "·[2Jbecause" in out
    assert "(no answer: the worker is gone)" in out
    assert "1 of 2 answers are wrong" in out
    assert "TP3, page 16 → TP1, page 16 over auto: 2.00 KiB as runs for 2 requests" in out
