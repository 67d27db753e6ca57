"""Tests of what ``kvferry plan`` refuses: incompatible sides and bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from running import SHAPE, document, plan

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
def test_incompatible_sides_are_refused_with_a_reason(
    capsys: pytest.CaptureFixture[str], words: str, code: str
) -> None:
    got = document(capsys, words, status=3)
    assert got["compatible"] is False
    assert code in [reason["code"] for reason in got["reasons"]]
    assert all(len(reason["message"]) > 20 for reason in got["reasons"])
    status, out, _ = plan(capsys, words)
    assert status == 3
    assert code in out


def reasons(capsys: pytest.CaptureFixture[str], words: str) -> list[tuple[str, str]]:
    """Return the code of each reason, and the side that it names."""
    got = document(capsys, words, status=3)["reasons"]
    assert all("prefill: " not in r["message"][1:] for r in got)
    sides = ("prefill: ", "decode: ")
    return [
        (r["code"], next((side for side in sides if r["message"].startswith(side)), ""))
        for r in got
    ]


def test_reasons_of_both_sides_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    tp, pp = "tp-does-not-fit-units", "pp-above-layers"
    assert reasons(capsys, f"--prefill tp=3,pp=65 --decode tp=12 {SHAPE}") == [
        (tp, "prefill: "),
        (pp, "prefill: "),
        (tp, "decode: "),
    ]
    assert reasons(capsys, f"--prefill tp=2 --decode pp=65 {SHAPE}") == [(pp, "decode: ")]
    # A reason of both sides is reported once, without a side.
    assert reasons(capsys, f"--prefill tp=3 --decode tp=3,pp=65 {SHAPE}") == [
        (tp, ""),
        (pp, "decode: "),
    ]
    shape = "--layers 2 --kv-heads 0 --head-dim 8"
    assert reasons(capsys, f"--prefill tp=3 --decode tp=2 {shape}") == [("no-units", "")]


def test_invalid_side_does_not_hide_a_mismatch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reasons(capsys, f"--prefill tp=3 --decode dtype=fp8 {SHAPE}") == [
        ("tp-does-not-fit-units", "prefill: "),
        ("dtype-differs", ""),
        ("dtype-differs", ""),
    ]


def test_heading_tells_a_bad_side_from_a_mismatch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, one, _ = plan(capsys, f"--prefill tp=3 --decode tp=1 {SHAPE}")
    _, both, _ = plan(capsys, f"--prefill tp=1 --decode dtype=fp8 {SHAPE}")
    assert one.startswith("This can't work:\n  prefill: tp=3")
    assert both.startswith("The two sides do not fit:\n  kv.k is bfloat16 at prefill")


def test_an_unknown_architecture_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "perceiver"}')
    got = document(capsys, f"--model {tmp_path} --prefill tp=1 --decode tp=1", status=3)
    assert [reason["code"] for reason in got["reasons"]] == ["unknown-architecture"]


# ---------------------------------------------------------------- bad input: status 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"--prefill tp=x --decode tp=1 {SHAPE}", "whole number"),
        (f"--prefill tp=0 --decode tp=1 {SHAPE}", "at least 1"),
        (f"--prefill 4 --decode tp=1 {SHAPE}", "--prefill is written as in tp=4"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --layer-ms -1", "a number from 0 to 1,000,000"),
        (f"--prefill tq=2 --decode tp=1 {SHAPE}", "did you mean 'tp'"),
        (f"--prefill tp --decode tp=1 {SHAPE}", "needs a value"),
        (f"--prefill tp=1,tp=2 --decode tp=1 {SHAPE}", "twice"),
        (f"--prefill prefix=3 --decode tp=1 {SHAPE}", "no key 'prefix'"),
        (f"--prefill order=xyz --decode tp=1 {SHAPE}", "nhd or hnd"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --dtype float3", "unknown dtype"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --tokens -1", "at least 0"),
        (f"--prefill tp=1 --decode prefix=9 {SHAPE} --tokens 8", "lower the prefix"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --cost-model wire", "nixl-host"),
        (
            f"--prefill tp=1 --decode tp=1 {SHAPE} --cost-model shm,gb_per_s=0",
            "from 1e-06 to 1,000,000",
        ),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --mode runes", "invalid choice"),
        (f"--prefill tp=2 --decode tp=1 {SHAPE} --mode runs", "not open"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --tokns 3", "did you mean --tokens"),
        (f"--prefil tp=1 --decode tp=1 {SHAPE}", "did you mean --prefill"),
        (f"--prefill tp=1 {SHAPE}", "--decode"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} extra", "extra"),
        ("--prefill tp=1 --decode tp=1 --layers 2", "--kv-heads, --head-dim missing"),
        ("--prefill tp=1 --decode tp=1 --model /no/such/file", "cannot read"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --model x", "drop one"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --svg /no/such/folder/x.svg", "cannot write"),
        (f"--prefill tp=9999 --decode tp=1 {SHAPE}", "at most"),
        (f"--prefill tp=1_0 --decode tp=1 {SHAPE}", "whole number"),
        (f"--prefill tp=١ --decode tp=1 {SHAPE}", "whole number"),
        (f"--prefill tp=1234567890123456789 --decode tp=1 {SHAPE}", "at most 18 digits"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --tokens 1073741825", "1073741824 tokens"),
        (f"--prefill tp=1 --decode page=1 {SHAPE} --tokens 1000000000", "fewer tokens"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --cost-model shm,gb_per_s=1e-320", "from 1e-06"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --cost-model shm,gb_per_s=1e999", "to 1,000,000"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --cost-model shm,gb_per_s=nan", "must be a number"),
        (
            f"--prefill tp=1 --decode tp=1 {SHAPE} --cost-model shm,descriptor_us=1e9",
            "to 1,000,000",
        ),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --mode foo", "'runs', 'slices', 'staged'"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --model x", "--layers, --kv-heads, --head-dim"),
        (f"--prefill tp=1 --decode tp=1 {SHAPE} --state-dtype bf16", "--state-dtype is for"),
        ("--prefill tp=1 --decode tp=1 --model /dev/zero", "not a file"),
        ("--prefill tp=1 --decode tp=1 --model /dev/null", "not a file"),
        (f"--prefill page.swa=4 --decode tp=1 {SHAPE}", "no group 'swa' in this cache; it has kv"),
        (f"--prefill page.kv=x --decode tp=1 {SHAPE}", "whole number"),
        (f"--prefill page.=4 --decode tp=1 {SHAPE}", "no key 'page.'"),
        (f"--prefill , --decode tp=1 {SHAPE}", "--prefill is empty"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    status, out, err = plan(capsys, words + " --json")
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert "[" not in err
    assert json.loads(out)["error"] in err


@pytest.mark.parametrize("flag", ["--prefill", "--decode", "--svg", "--html", "--model", "--dtype"])
@pytest.mark.parametrize("empty", ["", " "])
def test_empty_argument_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, empty: str
) -> None:
    words = ["--prefill", "tp=1", "--decode", "tp=1", *SHAPE.split(), flag, empty]
    status, _, err = plan(capsys, words)
    assert status == 2
    assert f"{flag} is empty" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--prefill", "tp=" + "9" * 5000],
        ["--prefill", "x" * 5000],
        ["--prefill", "dtype=" + "x" * 5000],
        ["--prefill", "order=" + "x" * 5000],
        ["--prefill", "tp=1", "--cost-model", "x" * 5000],
        ["--prefill", "tp=1", "--cost-model", "shm,gb_per_s=" + "1" * 5000],
        ["--prefill", "tp=1", "--mode", "x" * 5000],
        ["--prefill", "tp=1", "--" + "x" * 5000],
        ["--prefill", "tp=1", "x" * 5000],
        ["--prefill", "tp=1", "--model", "x" * 5000],
        ["--prefill", "tp=1", "--svg", "x" * 5000],
    ],
)
def test_long_arguments_are_shortened(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    shape = [] if "--model" in words else SHAPE.split()
    status, _, err = plan(capsys, [*words, "--decode", "tp=1", *shape])
    assert status == 2
    assert len(err) < 700


def test_undecodable_path_is_reported_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prefill", "tp=1", "--decode", "tp=1", "--model", "/\udcff\nx", "--json"]
    status, out, err = plan(capsys, words)
    assert status == 2
    assert err.count("\n") == 1
    assert "cannot read" in json.loads(out)["error"]


def test_pipe_is_not_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    status, _, err = plan(capsys, f"--prefill tp=1 --decode tp=1 --model {tmp_path / 'pipe'}")
    assert (status, "not a file" in err) == (2, True)


def test_large_file_is_not_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    status, _, err = plan(capsys, f"--prefill tp=1 --decode tp=1 --model {tmp_path}")
    assert (status, "too large" in err) == (2, True)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff\xfe", "nan", "[" * 100000])
def test_file_without_a_config_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    status, _, err = plan(capsys, f"--prefill tp=1 --decode tp=1 --model {file}")
    assert status == 2
    assert "config.json" in err
