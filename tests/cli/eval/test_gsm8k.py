"""``kvferry eval gsm8k`` against servers with scripted answers."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cli.eval.answering import MODEL, PATIENCE_S, Said, Server, answering, refusal, streamed
from reference.working import Worker, hosted, options_for
from running import heed_interrupts

from kvferry.cli.eval.problems import INSTRUCTION, read_problems
from kvferry.cli.main import main
from kvferry.layout.layout import Parallel
from kvferry.reference.models.tiny import make_tiny

OWN = Path(__file__).parents[2] / "data" / "gsm8k-like.jsonl"
PROBLEMS = read_problems(str(OWN))
KEY = {problem.question: problem for problem in PROBLEMS}
Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in an empty folder without an API key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def words_for(server: Server | None, *more: str) -> list[str]:
    where = ["--url", server.url] if server else []
    return ["eval", "gsm8k", "--data", str(OWN), *where, *more]


def document(capsys: Capture, status: int, server: Server, *more: str) -> dict[str, Any]:
    assert main(words_for(server, "--json", *more)) == status
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def lines_of(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# ---------------------------------------------------------------- servers


async def knows_all(server: Server, question: str, request: web.Request) -> Said:
    return f"Easy. {KEY[question].answer}"


async def knows_half(server: Server, question: str, request: web.Request) -> Said:
    """Answer even lines correctly; odd lines wrongly, without a number, or cut."""
    problem = KEY[question]
    if problem.line % 2 == 0:
        return f"It is ${problem.expected:,}."
    if problem.line == 9:
        return "I do not know."
    if problem.line == 11:
        return await streamed(request, "I think that 1 +", "length")
    return f"#### {problem.expected + 1}"


async def fails_often(server: Server, question: str, request: web.Request) -> Said:
    """Answer correctly but for three lines: two refused, one aborted."""
    problem = KEY[question]
    if problem.line in (10, 12):
        return refusal(503, "no worker \x1b[2Jis up")
    if problem.line == 13:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "#### 1000"}]}\n\n')
        return response
    return problem.answer


def stops_after(num: int) -> Any:
    """Return an answer function that hangs after ``num`` answers."""
    gate = iter(range(num))

    async def answer(server: Server, question: str, request: web.Request) -> Said:
        if next(gate, None) is None:
            await asyncio.Event().wait()
        return KEY[question].answer

    return answer


# ---------------------------------------------------------------- scores


def test_a_perfect_score(capsys: Capture, here: Path) -> None:
    with answering(knows_all) as server:
        found = document(capsys, 0, server, "--concurrency", "3")
    assert found["eval"] == "gsm8k"
    assert (found["model"], found["url"], found["data"]) == (MODEL, server.url, str(OWN))
    assert (found["shots"], found["num"], found["concurrency"]) == (8, 6, 3)
    assert (found["asked"], found["answered"], found["failed"], found["right"]) == (6, 6, 0, 6)
    assert (found["score"], found["standard_error"]) == (1.0, 0.0)
    assert 0 < found["latency_s"]["p50"] <= found["latency_s"]["p99"] <= found["seconds"]
    tokens = sum(len(f"Easy. {p.answer}".split(" ")) for p in PROBLEMS[8:])
    assert found["output_tokens"] == tokens
    assert found["output_tokens_per_s"] == pytest.approx(tokens / found["seconds"])
    assert found["interrupted"] is False
    # Every prompt has the shots, and no shot is asked. Questions begin in the file's order; only
    # those in flight together may overtake each other.
    wanted = [problem.question for problem in PROBLEMS[8:]]
    assert sorted(server.asked) == sorted(wanted)
    assert all(abs(server.asked.index(one) - place) < 3 for place, one in enumerate(wanted))
    for body in server.bodies:
        assert all(f"Answer: {problem.answer}\n\n" in body["prompt"] for problem in PROBLEMS[:8])
        assert body["stop"] == ["Question:"]
    assert set(server.paths) == {"/v1/completions"}
    assert server.most_under_way <= 3


def test_one_at_a_time_questions_are_asked_in_the_files_order(capsys: Capture) -> None:
    with answering(knows_all) as server:
        document(capsys, 0, server, "--concurrency", "1")
    assert server.asked == [problem.question for problem in PROBLEMS[8:]]


def test_a_score_and_its_standard_error(capsys: Capture) -> None:
    with answering(knows_half) as server:
        found = document(capsys, 0, server, "--shots", "2", "--num", "10", "--log", "log.jsonl")
    assert (found["asked"], found["right"], found["score"]) == (10, 5, 0.5)
    assert found["standard_error"] == pytest.approx(math.sqrt(0.25 / 10))
    assert (found["no_number"], found["cut"], found["failures"]) == (1, 1, {})
    log = {one["line"]: one for one in lines_of("log.jsonl")}
    assert sorted(log) == list(range(3, 13))
    assert all(one["right"] is (line % 2 == 0) for line, one in log.items())
    assert (log[3]["expected"], log[3]["got"]) == ("200", "201")
    assert (log[9]["got"], log[9]["answer"]) == (None, "I do not know.")
    assert (log[11]["got"], log[11]["finish"]) == ("1", "length")
    assert log[4]["question"] == PROBLEMS[3].question
    assert (log[4]["prompt_tokens"], log[4]["output_tokens"], log[4]["error"]) == (5, 3, "")
    assert 0 < log[4]["ttft_s"] <= log[4]["total_s"]


def test_the_printed_score(capsys: Capture, here: Path) -> None:
    with answering(knows_half) as server:
        assert main(words_for(server, "--shots", "2", "--num", "10")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"gsm8k, 2 shots: {MODEL} at {server.url}" in out
    assert "0.500 ± 0.158  (5 of 10 right; ± is the standard error of the mean" in out
    assert "no number   1, counted as wrong" in out
    assert "cut         1 at --max-tokens" in out
    for word in ("latency", "p50", "p99", "tokens/s"):
        assert word in out
    assert "failed" not in out
    (log,) = here.glob("gsm8k-*.jsonl")
    assert f"log         {log.name}" in out
    assert len(lines_of(log)) == 10


def test_a_chat_with_a_key_and_a_model(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-outside")
    chat = ("--chat", "--model", MODEL, "--max-tokens", "77", "--num", "2")
    with answering(knows_all) as server:
        assert document(capsys, 0, server, *chat, "--log", "a")["score"] == 1.0
        own = (*chat, "--log", "b", "--api-key", "own")
        assert document(capsys, 0, server, *own)["chat"] is True
    assert set(server.paths) == {"/v1/chat/completions"}
    assert [one["Authorization"][7:] for one in server.headers] == 3 * ["from-outside"] + 3 * [
        "own"
    ]
    assert server.bodies[1]["max_tokens"] == 77
    messages = server.bodies[1]["messages"]
    assert len(messages) == 17
    assert messages[1] == {"role": "assistant", "content": PROBLEMS[0].answer}
    assert messages[-1]["content"] == f"{PROBLEMS[8].question}\n\n{INSTRUCTION}"


def test_shots_from_another_file(capsys: Capture, here: Path) -> None:
    train = here / "train.jsonl"
    train.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    with answering(knows_all) as server:
        found = document(capsys, 0, server, "--train", str(train), "--shots", "1")
    assert (found["shots"], found["asked"], found["score"]) == (1, 14, 1.0)
    assert server.bodies[0]["prompt"].startswith("Question: 1 + 1?\nAnswer: #### 2\n\nQuestion: ")


# ---------------------------------------------------------------- what goes wrong


def test_failures_are_counted_separately_and_set_the_status(capsys: Capture) -> None:
    with answering(fails_often) as server:
        found = document(capsys, 1, server, "--log", "log")
        assert main(words_for(server, "--log", "printed")) == 1
    out = capsys.readouterr().out
    assert (found["asked"], found["answered"], found["failed"]) == (6, 3, 3)
    assert (found["right"], found["score"]) == (3, 1.0)
    lines = {reason: sorted(which) for reason, which in found["failures"].items()}
    assert lines.pop("no worker \x1b[2Jis up") == [10, 12]
    assert list(lines.values()) == [[13]]
    assert "3 of 6, which the score leaves out" in out
    assert "lines 10, 12: no worker ·[2Jis up" in out
    log = {one["line"]: one for one in lines_of("log")}
    assert sorted(log) == list(range(9, 15))
    assert (log[13]["right"], log[13]["answer"]) == (None, "#### 1000")
    assert log[13]["error"]


def test_a_question_has_a_deadline(capsys: Capture) -> None:
    with answering(stops_after(5)) as server:
        found = document(capsys, 1, server, "--deadline", "0.5")
    assert (found["answered"], found["failed"]) == (5, 1)
    assert "within 0.5 s" in next(iter(found["failures"]))


def test_no_answer_gives_no_score(capsys: Capture) -> None:
    with answering(stops_after(0)) as server:
        more = ("--deadline", "0.3")
        found = document(capsys, 1, server, *more, "--log", "log")
        assert (found["score"], found["standard_error"], found["latency_s"]) == (None, None, None)
        assert main(words_for(server, *more, "--log", "printed")) == 1
    assert "unknown, because no question was answered" in capsys.readouterr().out


@pytest.mark.parametrize(("num", "as_json"), [(4, True), (4, False), (0, True)])
def test_an_interrupt_keeps_the_answers(here: Path, num: int, as_json: bool) -> None:
    with answering(stops_after(num)) as server:
        words = words_for(server, "--shots", "1", "--concurrency", "2", "--log", "log")
        heed_interrupts()
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry", *words, *(["--json"] if as_json else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=here,
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (server.under_way == 2 and len(lines_of(here / "log")) == num):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, err) == (130, "")
    if as_json:
        found = json.loads(out)
        assert (found["interrupted"], found["asked"], found["num"]) == (True, num, 13)
        assert (found["score"], found["failed"]) == (1.0 if num else None, 0)
    else:
        assert "4 of 13 questions have ended" in out


def test_a_log_that_cannot_be_written_ends_the_run(capsys: Capture) -> None:
    with answering(knows_all) as server:
        assert main(words_for(server, "--log", "no/such/folder/log")) == 2
        # Not a byte may be written to a file.
        limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", sys.executable, "-m", "kvferry"]
        full = subprocess.run(
            [*limited, *words_for(server, "--log", "log")],
            check=False,
            capture_output=True,
            text=True,
        )
    err = capsys.readouterr().err
    assert "cannot write the log 'no/such/folder/log': No such file or directory; name" in err
    assert full.returncode == 2
    assert "cannot write the log 'log': File too large; name another with --log" in full.stderr


def test_a_log_never_replaces_a_file(capsys: Capture, here: Path) -> None:
    copy = here / "copy.jsonl"
    copy.write_bytes(OWN.read_bytes())
    with answering(knows_all) as server:
        words = ["eval", "gsm8k", "--url", server.url, "--data", "copy.jsonl"]
        assert main([*words, "--log", "./copy.jsonl"]) == 2
    assert "File exists; name another with --log" in capsys.readouterr().err
    assert copy.read_bytes() == OWN.read_bytes()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--url", "x"], "'x' is no address"),
        (["--url", "http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1 (Connection refused)"),
        (["--url", "http://127.0.0.1:1", "--model", "m"], "(Connection refused); check --url"),
        (["--url", "http://h", "--shots", "14"], "14 shots and a question to ask are more than"),
        (["--url", "http://h", "--num", "7"], "--num 7 is more than the 6 questions"),
        (["--url", "http://h", "--num", "0"], "--num must be at least 1"),
        (["--url", "http://h", "--shots", "-1"], "--shots must be at least 0"),
        (["--url", "http://h", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["--url", "http://h", "--max-tokens", "x"], "--max-tokens must be a whole number"),
        (["--url", "http://h", "--deadline", "0"], "--deadline must be a number from 0.1 to"),
        (["--url", "http://h", "--train", "none"], "cannot read 'none'"),
        (["--url", "http://h", "--data", "none"], "cannot read 'none'"),
        (["--url", "http://h", "--api-key", ""], "--api-key is empty"),
        (["--url", "http://h", "--log", ""], "--log is empty"),
        (["--shots", "1"], "the following arguments are required: --url"),
        (["--urls", "x"], "did you mean --url?"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    capsys: Capture, here: Path, words: list[str], sentence: str
) -> None:
    assert main(words_for(None, *words)) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert (out, err.count("\n")) == ("", 1)
    assert list(here.iterdir()) == []


def test_an_unknown_model_is_reported_once(capsys: Capture, here: Path) -> None:
    with answering(knows_all) as server:
        assert main(words_for(server, "--model", "nobody")) == 2
    err = capsys.readouterr().err
    assert f"{server.url} does not answer a first request for the model 'nobody'" in err
    assert "does not exist; check --url, --model and --api-key" in err
    assert len(server.bodies) == 1
    assert list(here.iterdir()) == []


def test_help_explains_the_score(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "gsm8k", "--help"])
    out = capsys.readouterr().out
    assert "standard error" in out
    assert "are not asked" in out


# ---------------------------------------------------------------- our own


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    with hosted(options_for("decode", folder, None, Parallel())) as (running,):
        yield running


@pytest.mark.parametrize("chat", [False, True])
def test_a_worker_is_scored(capsys: Capture, worker: Worker, chat: bool) -> None:
    """A random model answers, though wrongly."""
    words = ["--url", f"{worker.url}/v1", "--shots", "1", "--num", "5", "--max-tokens", "8"]
    words += ["--concurrency", "3", "--log", "log", "--json", *(["--chat"] if chat else [])]
    assert main(words_for(None, *words)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["asked"], found["answered"], found["model"]) == (5, 5, "model")
    assert 5 <= found["output_tokens"] <= 40
    log = lines_of("log")
    assert sorted(one["line"] for one in log) == [2, 3, 4, 5, 6]
    assert all(one["prompt_tokens"] > 50 and one["ttft_s"] > 0 for one in log)


def test_a_prompt_that_is_too_long_is_reported_once(capsys: Capture, worker: Worker) -> None:
    words = ["--url", worker.url, "--shots", "13"]
    assert main(words_for(None, *words)) == 2
    assert "maximum context length" in capsys.readouterr().err
