"""``kvferry bench serve`` against a worker and against faulty endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from cli.load.endpoints import counted_stream, refusal, served, stream, streaming
from reference.working import hosted, options_for

from kvferry.cli.main import main
from kvferry.layout.layout import Parallel
from kvferry.reference.models.tiny import make_tiny

SMALL = "--concurrency 1,3 --requests 4 --input-tokens 24 --output-tokens 5"


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        document = json.loads(line)
        assert isinstance(document, dict)
        return document


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(words: str) -> Ran:
        status = main(["bench", "serve", *words.split()])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker that prefills and decodes."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), seed=7)
    with hosted(options_for("decode", folder, None, Parallel())) as (running,):
        yield running.url


def test_a_worker_is_measured(bench: Any, worker: str, tmp_path: Path) -> None:
    figure = tmp_path / "sweep.png"
    done = bench(f"--url {worker}/v1 {SMALL} --json --seed 5 --plot {figure}")
    assert (done.status, done.err) == (0, "")
    document = done.document
    assert set(document) == {
        *("url", "model", "form", "input_tokens", "output_tokens", "seed", "levels", "error")
    }
    assert (document["model"], document["seed"], document["error"]) == ("model", 5, None)
    # The tiny model knows 257 tokens.
    assert document["form"] == "token ids below 250"
    assert [level["concurrency"] for level in document["levels"]] == [1, 3]
    for level in document["levels"]:
        assert (level["requests"], level["failed"], level["first_failure"]) == (4, 0, None)
        assert level["prompt_tokens"] == {"least": 24, "most": 24}
        assert level["output_tokens"] == {"least": 5, "most": 5}
        assert level["output_tokens_per_s"] == pytest.approx(5 * level["requests_per_s"])
        for name in ("ttft_s", "tpot_s", "total_s"):
            assert 0 < level[name]["p50"] <= level[name]["p99"]
        assert level["ttft_s"]["p50"] < level["total_s"]["p50"]
        assert level["carried_bytes"] is None
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_printed_report(bench: Any, worker: str) -> None:
    done = bench(f"--url {worker} --model model --concurrency 2 --requests 2 --output-tokens 2")
    assert (done.status, done.err) == (0, "")
    heads, row, *_ = done.out.splitlines()
    assert heads.split()[:4] == ["at", "once", "requests", "failed"]
    assert row.split()[:3] == ["2", "2", "0"]
    assert "the server counted 256 prompt tokens and 2 output tokens in each" in done.out
    assert "no two prompts begin alike" in done.out


def test_the_key_may_come_from_the_environment(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def guarded(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer secret":
            return refusal("who are you?", 401)
        return await stream(request, *counted_stream(24, 5))

    with served(guarded) as url:
        refused = bench(f"--url {url} {SMALL}")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        taken = bench(f"--url {url} {SMALL}")
    assert (refused.status, taken.status) == (2, 0)
    assert refused.err == "kvferry: the warm-up request failed: who are you?\n"


def test_a_prompt_that_is_too_long_is_one_sentence(bench: Any, worker: str) -> None:
    done = bench(f"--url {worker} --input-tokens 100000")
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "maximum context length" in done.err


def test_a_wrong_model_is_one_sentence(bench: Any, worker: str) -> None:
    done = bench(f"--url {worker} --model gpt-9 --json")
    assert done.status == 2
    assert "'gpt-9' does not exist" in done.document["error"]


def test_failures_are_reported_beside_the_results(bench: Any) -> None:
    asked = 0

    async def flaky(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 3:
            return refusal("the worker has the flu", 503)
        return await stream(request, *counted_stream(7, 5))

    with served(flaky) as url:
        done = bench(f"--url {url} {SMALL} --json")
    assert done.status == 1
    sentence = "1 of 8 requests failed; the first: the worker has the flu"
    assert done.err == f"kvferry: {sentence}\n"
    assert done.document["error"] == sentence
    assert [level["failed"] for level in done.document["levels"]] == [1, 0]
    # The endpoint's own token counts are reported as they are.
    assert done.document["levels"][0]["prompt_tokens"] == {"least": 7, "most": 7}


def test_an_endpoint_that_does_not_stream_or_count(bench: Any) -> None:
    async def whole(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "a b", "finish_reason": "stop"}]})

    with served(whole) as url:
        done = bench(f"--url {url} --concurrency 1 --requests 2")
    assert done.status == 0
    assert "the server did not say how many tokens it counted" in done.out
    row = done.out.splitlines()[1].split()
    # Without a stream there is no time per token.
    assert row.count("-") == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--url nowhere", "is no address"),
        ("--url http://127.0.0.1:1", "no model can be found: cannot connect to 127.0.0.1:1"),
        ("--url http://127.0.0.1:1 --model m", "the warm-up request failed: cannot connect to"),
        ("--url http://h --concurrency 1,x", "--concurrency must be a whole number"),
        ("--url http://h --concurrency 1,0", "--concurrency must be at least 1"),
        ("--url http://h --concurrency 5000", "--concurrency must be at most 4096"),
        ("--url http://h --input-tokens 0", "--input-tokens must be at least 1"),
        ("--url http://h --output-tokens 99999999", "--output-tokens must be at most 1048576"),
        ("--url http://h --requests -1", "--requests must be at least 1"),
        ("--url http://h --deadline 0", "--deadline must be a number from 0.1 to"),
        ("--url http://h --plot x.doc", "end its name in png, svg, pdf"),
        ("--url http://h --plot /nowhere/x.png", "choose a folder that exists"),
        ("", "--url"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(bench: Any, words: str, sentence: str) -> None:
    done = bench(words)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_a_failed_figure_keeps_the_results(bench: Any, tmp_path: Path) -> None:
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    with served(streaming(*counted_stream(24, 5))) as url:
        done = bench(f"--url {url} {SMALL} --json --plot {full}")
    assert done.status == 1
    assert "No space left on device" in done.err
    assert len(done.document["levels"]) == 2
