"""``kvferry plan`` as its users run it: documents, tables, pictures, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvferry.cli.main import main

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
SHAPE = "--layers 64 --kv-heads 8 --head-dim 128"


def plan(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    status = main(["plan", *words.split()])
    out, err = capsys.readouterr()
    return status, out, err


def document(capsys: pytest.CaptureFixture[str], words: str, status: int = 0) -> dict[str, Any]:
    got, out, _ = plan(capsys, words + " --json")
    assert got == status
    result = json.loads(out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


# ---------------------------------------------------------------- the document


def test_the_document_has_all_that_was_promised(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=4 --decode tp=1,dp=4,page=16 {SHAPE} --dtype bfloat16 --tokens 8192"
    got = document(capsys, words)
    assert got["compatible"] is True
    assert got["reasons"] == []
    assert got["bytes"] == 64 * 2 * 8 * 128 * 2 * 8192
    assert len(got["moves"]) == 4
    assert got["moves"][1] | {"bytes": 0, "pieces": 0, "path": ""} == {
        "group": "kv",
        "source": 1,
        "target": 0,
        "layers": [0, 64],
        "units": [2, 4],
        "source_unit": 0,
        "target_unit": 2,
        "tokens": [0, 8192, 1],
        "bytes": 0,
        "pieces": 0,
        "path": "",
    }
    assert got["paths"]["slices"]["pieces"] == 4 * 64 * 2 * 8192
    assert {path["bytes"] for path in got["paths"].values()} == {got["bytes"]}
    assert got["chosen"] == "staged"
    assert not got["paths"]["runs"]["open"]


def test_equal_sides_take_the_runs_path(capsys: pytest.CaptureFixture[str]) -> None:
    apart = document(capsys, f"--prefill tp=2 --decode tp=2 {SHAPE} --tokens 256")
    beside = document(
        capsys, f"--prefill tp=2 --decode tp=2 {SHAPE} --tokens 256 --pages neighbours"
    )
    assert apart["chosen"] == beside["chosen"] == "runs"
    assert apart["paths"]["runs"]["pieces"] == 2 * 64 * 2 * 16
    assert beside["paths"]["runs"]["pieces"] == 2 * 64 * 2
    assert apart["digest"] == beside["digest"]


def test_a_prefix_and_a_stride_show_in_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    got = document(capsys, f"--prefill cp=2 --decode prefix=7 {SHAPE} --tokens 20")
    assert [move["tokens"] for move in got["moves"]] == [[8, 19, 2], [7, 20, 2]]
    assert got["bytes"] == 13 * 64 * 8 * 512


def test_a_request_that_is_cached_in_full_moves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--prefill tp=2 --decode prefix=20 {SHAPE} --tokens 20"
    got = document(capsys, words)
    assert (got["bytes"], got["moves"], got["compatible"]) == (0, [], True)
    status, out, _ = plan(capsys, words)
    assert status == 0
    assert "Nothing travels" in out


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.json")))
def test_every_model_plans(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words = f"--model {CONFIGS / name} --tokens 300 --prefill page=64 --decode pp=2,page=16"
    got = document(capsys, words)
    assert got["bytes"] > 0
    assert {move["target"] for move in got["moves"]} == {0, 1}


def test_a_folder_with_a_config_is_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "llama-3.1-8b.json").read_bytes())
    assert document(capsys, f"--model {tmp_path} --prefill tp=2 --decode tp=1")["compatible"]


def test_link_constants_change_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=2 --decode tp=1 {SHAPE} --tokens 64"
    free = document(capsys, f"{words} --link nixl-host,descriptor_us=0.0001")
    assert document(capsys, words)["chosen"] == "staged"
    assert free["chosen"] == "slices"
    assert document(capsys, f"{words} --link shm")["paths"]["staged"]["open"] is False
    assert document(capsys, f"{words} --path slices")["chosen"] == "slices"


# ---------------------------------------------------------------- refusals: status 3


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (f"--prefill tp=3 --decode tp=1 {SHAPE}", "tp-does-not-fit-units"),
        (f"--prefill tp=1 --decode tp=12 {SHAPE}", "tp-does-not-fit-units"),
        (f"--prefill pp=65 --decode tp=1 {SHAPE}", "pp-above-layers"),
        (f"--prefill pp=2,stages=1+2 --decode tp=1 {SHAPE}", "stages-do-not-add-up"),
        ("--prefill tp=1 --decode tp=1 --layers 2 --kv-heads 0 --head-dim 8", "no-units"),
        ("--prefill tp=1 --decode tp=1 --layers 0 --kv-heads 2 --head-dim 8", "no-layers"),
        (f"--prefill tp=1 --decode tp=1,dtype=fp8 {SHAPE}", "dtype-differs"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(
    capsys: pytest.CaptureFixture[str], words: str, code: str
) -> None:
    got = document(capsys, words, status=3)
    assert got["compatible"] is False
    assert code in [reason["code"] for reason in got["reasons"]]
    assert all(len(reason["message"]) > 20 for reason in got["reasons"])
    status, out, _ = plan(capsys, words)
    assert status == 3
    assert code in out


def test_an_unknown_architecture_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceiver"}')
    got = document(capsys, f"--model {tmp_path} --prefill tp=1 --decode tp=1", status=3)
    assert [reason["code"] for reason in got["reasons"]] == ["unknown-architecture"]


# ---------------------------------------------------------------- mistakes: status 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"--prefill tp=x --decode tp=1 {SHAPE}", "whole number"),
        (f"--prefill tp=0 --decode tp=1 {SHAPE}", "at least 1"),
        (f"--prefill tq=2 --decode tp=1 {SHAPE}", "did you mean 'tp'"),
        (f"--prefill tp --decode tp=1 {SHAPE}", "needs a value"),
        (f"--prefill tp=1,tp=2 --decode tp=1 {SHAPE}", "twice"),
        (f"--prefill prefix=3 --decode tp=1 {SHAPE}", "no key 'prefix'"),
        (f"--prefill order=xyz --decode tp=1 {SHAPE}", "nhd or hnd"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --dtype float3", "unknown dtype"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --tokens -1", "at least 0"),
        (f"--prefill tp=1 --decode prefix=9 {SHAPE} --tokens 8", "lower the prefix"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --link wire", "nixl-host"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --link shm,gb_per_s=0", "above 0"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --path runes", "invalid choice"),
        (f"--prefill tp=2 --decode tp=1 {SHAPE} --path runs", "not open"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --tokns 3", "did you mean --tokens"),
        (f"--prefil tp=1 --decode tp=1 {SHAPE}", "did you mean --prefill"),
        (f"--prefill tp=1 {SHAPE}", "--decode"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} extra", "extra"),
        ("--prefill tp=1 --decode tp=1 --layers 2", "--kv-heads, --head-dim missing"),
        ("--prefill tp=1 --decode tp=1 --model /no/such/file", "cannot read"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --model x", "drop one"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --svg /no/such/folder/x.svg", "cannot write"),
        (f"--prefill tp=9999 --decode tp=1 {SHAPE}", "at most"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    status, out, err = plan(capsys, words + " --json")
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert json.loads(out)["error"] in err


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff\xfe", "nan", "[" * 100000])
def test_a_file_that_is_no_config_is_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    status, _, err = plan(capsys, f"--prefill tp=1 --decode tp=1 --model {file}")
    assert status == 2
    assert "config.json" in err


# ---------------------------------------------------------------- for people


def test_the_table_shows_who_sends_what(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(capsys, f"--prefill tp=2,pp=2 --decode tp=1 {SHAPE}")
    assert status == 0
    assert "3 (pp1 tp1)" in out
    assert "32-63" in out
    assert "exactly once" in out


def test_long_plans_are_cut_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=8,pp=8 --decode tp=1 {SHAPE}"
    _, short, _ = plan(capsys, words)
    _, full, _ = plan(capsys, words + " --all")
    assert "24 more moves" in short
    assert "more moves" not in full
    assert full.count("\n") > short.count("\n")


def test_pictures_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, html = tmp_path / "plan.svg", tmp_path / "plan.html"
    words = f"--prefill tp=2 --decode tp=4 {SHAPE} --svg {svg} --html {html}"
    status, out, _ = plan(capsys, words)
    assert status == 0
    assert f"picture: {svg}" in out
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "<svg" in html.read_text()


def test_the_installed_command_works_and_a_closed_pipe_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "kvferry", "plan", "--all", "--prefill", "tp=8,pp=64"]
    command += ["--decode", "tp=1", *SHAPE.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("TP8·PP64".encode())
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    # 0 where everything was written before the pipe closed.
    assert process.wait() in (0, 1)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--help"])
    assert left.value.code == 0
    assert "example:" in capsys.readouterr().out
