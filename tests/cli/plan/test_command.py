"""Tests of ``kvferry plan``: the JSON document, tables and pictures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from running import SHAPE, document, plan

from kvferry.cli.main import main

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


# ---------------------------------------------------------------- documentation


PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
# A command, and its output in the same block or in the next one.
SHOWN = re.findall(
    r"```console\n\$ kvferry (plan [^`]*?)\n(?:\.\.\.|```\n\n```)\n(.*?)```", PAGE, re.DOTALL
)


@pytest.mark.parametrize(("command", "lines"), SHOWN)
def test_docs_show_what_is_printed(
    command: str, lines: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.replace("\\\n", "").split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = lines.splitlines()
    assert printed[-len(shown) :] == shown


def test_docs_show_three_commands() -> None:
    assert len(SHOWN) == 3


# ---------------------------------------------------------------- the document


def test_document_has_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=4 --decode tp=1,dp=4,page=16 {SHAPE} --dtype bfloat16 --tokens 8192"
    got = document(capsys, words)
    assert got["compatible"] is True
    assert got["reasons"] == []
    assert got["bytes"] == 64 * 2 * 8 * 128 * 2 * 8192
    assert len(got["moves"]) == 4
    assert got["moves"][1] | {"bytes": 0, "pieces": 0, "mode": ""} == {
        "group": "kv",
        "source": 1,
        "target": 0,
        "layers": [0, 64],
        "units": [2, 4],
        "source_unit": 0,
        "target_unit": 2,
        "tokens": {"first": 0, "end": 8192, "period": 1, "runs": [[0, 1]]},
        "bytes": 0,
        "pieces": 0,
        "mode": "",
    }
    assert got["modes"]["slices"]["pieces"] == 4 * 64 * 2 * 8192
    assert {mode["bytes"] for mode in got["modes"].values()} == {got["bytes"]}
    assert got["chosen"] == "staged"
    assert not got["modes"]["runs"]["open"]


def test_equal_sides_use_runs(capsys: pytest.CaptureFixture[str]) -> None:
    apart = document(capsys, f"--prefill tp=2 --decode tp=2 {SHAPE} --tokens 256")
    beside = document(
        capsys, f"--prefill tp=2 --decode tp=2 {SHAPE} --tokens 256 --pages neighbours"
    )
    assert apart["chosen"] == beside["chosen"] == "runs"
    assert apart["modes"]["runs"]["pieces"] == 2 * 64 * 2 * 16
    assert beside["modes"]["runs"]["pieces"] == 2 * 64 * 2
    assert apart["digest"] == beside["digest"]


def test_layer_time_gives_layers_per_push(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=4 --decode tp=8 {SHAPE} --tokens 4096 --cost-model rdma-400g"
    slow = document(capsys, f"{words} --layer-ms 2.5")["layers_per_push"]
    assert 1 <= slow["layers"] <= 16
    assert slow["left_s"] < slow["whole_s"] / 3
    quick = document(capsys, f"{words} --layer-ms 0.001")["layers_per_push"]
    assert quick["layers"] == 64
    assert "little to hide it behind" in quick["reason"]
    assert "layers_per_push" not in document(capsys, words)
    assert main(["plan", *f"{words} --layer-ms 2.5".split()]) == 0
    assert f"layers per push: {slow['layers']}, because sending" in capsys.readouterr().out


def test_tokens_show_prefix_and_turns(capsys: pytest.CaptureFixture[str]) -> None:
    got = document(capsys, f"--prefill cp=2 --decode prefix=7 {SHAPE} --tokens 20")
    assert [move["tokens"] for move in got["moves"]] == [
        {"first": 8, "end": 19, "period": 2, "runs": [[0, 1]]},
        {"first": 7, "end": 20, "period": 2, "runs": [[1, 2]]},
    ]
    assert got["bytes"] == 13 * 64 * 8 * 512


def test_interleave_of_a_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill cp=8,interleave=64 --decode tp=2 {SHAPE} --tokens 1000"
    got = document(capsys, words)
    assert got["prefill"] == "TP1·CP8·interleave 64, page 16, NHD"
    first = next(move["tokens"] for move in got["moves"] if move["source"] == 1)
    assert first == {"first": 64, "end": 640, "period": 512, "runs": [[64, 128]]}
    assert got["bytes"] == 1000 * 64 * 8 * 512
    _, out, _ = plan(capsys, words)
    assert "64-639, 64 of 512" in out
    assert "CP8·interleave 64" in out


@pytest.mark.parametrize(
    ("side", "says"),
    [("tp=8,interleave=64", "add cp or dcp"), ("tp=4,dcp=3", "must divide"), ("dcp=0", "dcp")],
)
def test_interleaves_without_meaning_are_refused(
    capsys: pytest.CaptureFixture[str], side: str, says: str
) -> None:
    status, _, error = plan(capsys, f"--prefill {side} --decode tp=2 {SHAPE} --tokens 10")
    assert (status, says in error) == (2, True)


def test_fully_cached_request_moves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"--prefill tp=2 --decode prefix=20 {SHAPE} --tokens 20"
    got = document(capsys, words)
    assert (got["bytes"], got["moves"], got["compatible"]) == (0, [], True)
    status, out, _ = plan(capsys, words)
    assert status == 0
    assert "Nothing to move" in out


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.json")))
def test_every_model_config_can_be_planned(capsys: pytest.CaptureFixture[str], name: str) -> None:
    # Pages must hold whole entries of DeepSeek V4, of which some stand for 128 tokens.
    pages = "page=256", "pp=2,page=128" if "v4" in name else "pp=2,page=16"
    words = f"--model {CONFIGS / name} --tokens 300 --prefill {pages[0]} --decode {pages[1]}"
    got = document(capsys, words)
    assert got["bytes"] > 0
    assert {move["target"] for move in got["moves"]} == {0, 1}


def test_packed_latents_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--model {CONFIGS / 'deepseek-v3.2.json'} --tokens 1000 --prefill tp=8 --decode tp=2"
    assert document(capsys, f"{words} --dtype fp8_ds_mla")["bytes"] == 2 * 61 * (656 + 132) * 1000
    status, out, error = plan(capsys, f"{words},dtype=fp8_ds_mla")
    assert status == 3
    assert "one KV-cache dtype" in " ".join((out + error).split())
    status, _, error = plan(capsys, f"--prefill tp=1 --decode tp=1 {SHAPE} --dtype fp8_ds_mla")
    assert (status, "use fp8" in error) == (2, True)


def test_page_must_hold_whole_entries(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--model {CONFIGS / 'deepseek-v4-flash.json'} --prefill page=16 --decode page=128"
    status, _, error = plan(capsys, words)
    assert (status, "does not hold whole entries" in error) == (2, True)


def test_pages_of_groups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    side = "page=256,page.swa=64,page.sparse_inputs=4,page.heavy_inputs=8,page.index_inputs=4"
    words = f"--model {CONFIGS / 'deepseek-v4-flash.json'} --prefill {side} --decode page=128"
    got = document(capsys, f"{words} --tokens 1000 --html {tmp_path / 'x.html'}")
    sizes = "page 256 (swa 64, sparse_inputs 4, heavy_inputs 8, index_inputs 4)"
    assert got["prefill"] == f"TP1, {sizes}, NHD"
    assert f"Prefill: 1 rank, {sizes}, NHD" in (tmp_path / "x.html").read_text(encoding="utf-8")
    small = document(capsys, f"{words.replace('swa=64', 'swa=2')} --tokens 1000")
    assert small["modes"]["runs"]["pieces"] > got["modes"]["runs"]["pieces"]
    assert small["bytes"] == got["bytes"]


def test_model_may_be_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "llama-3.1-8b.json").read_bytes())
    assert document(capsys, f"--model {tmp_path} --prefill tp=2 --decode tp=1")["compatible"]


def test_partial_page_keeps_runs_open(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=2,order=hnd --decode tp=2,order=hnd {SHAPE}"
    for tokens, pieces in ((4096, 256), (4100, 256 + 4), (3, 4)):
        got = document(capsys, f"{words} --tokens {tokens}")["modes"]["runs"]
        assert got["open"] is True
        assert got["pieces"] == 2 * 64 * 2 * pieces


def test_closed_mode_still_counts_its_pieces(
    capsys: pytest.CaptureFixture[str],
) -> None:
    got = document(capsys, f"--prefill tp=2 --decode tp=1 {SHAPE} --tokens 64")["modes"]
    assert got["runs"]["open"] is False
    assert got["runs"]["pieces"] == got["slices"]["pieces"] == 2 * 64 * 2 * 64


def test_bytes_are_exact_beyond_64_bits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--prefill pp=4096 --decode pp=4096,page=1024 --layers 4096 --kv-heads 65536"
    got = document(capsys, f"{words} --head-dim 16777216 --tokens 100000")
    assert got["bytes"] == 4096 * 65536 * (1 << 24) * 2 * 2 * 100_000 > 1 << 64
    assert sum(move["bytes"] for move in got["moves"]) == got["bytes"]
    assert {mode["bytes"] for mode in got["modes"].values()} == {got["bytes"]}


def test_stages_imply_pp(capsys: pytest.CaptureFixture[str]) -> None:
    got = document(capsys, f"--prefill stages=1+63 --decode tp=1 {SHAPE}")
    assert [move["layers"] for move in got["moves"]] == [[0, 1], [1, 64]]
    assert got["prefill"].startswith("TP1·PP2")


def test_state_dtype_flag(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=2 --decode tp=1 --tokens 1 --model {CONFIGS / 'bamba-9b.json'}"
    wide, narrow = (document(capsys, words + more) for more in ("", " --state-dtype bf16"))
    assert wide["bytes"] - narrow["bytes"] == 29 * 128 * (64 * 128) * 2


def test_large_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--prefill tp=64,pp=8 --decode tp=32,pp=4 --layers 128 --kv-heads 64 --head-dim 128"
    assert len(document(capsys, words)["moves"]) == 512
    words = "--prefill tp=4096 --decode tp=2048 --layers 64 --kv-heads 4096 --head-dim 128"
    assert len(document(capsys, words)["moves"]) == 4096


def test_cost_model_changes_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--prefill tp=2 --decode tp=1 {SHAPE} --tokens 64"
    free = document(capsys, f"{words} --cost-model nixl-host,descriptor_us=0.0001")
    assert document(capsys, words)["chosen"] == "staged"
    assert free["chosen"] == "slices"
    assert document(capsys, f"{words} --cost-model shm")["modes"]["staged"]["open"] is False
    assert document(capsys, f"{words} --mode slices")["chosen"] == "slices"


# ---------------------------------------------------------------- tables


def test_table_shows_moves(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = plan(capsys, f"--prefill tp=2,pp=2 --decode tp=1 {SHAPE}")
    assert status == 0
    assert "3 (pp1 tp1)" in out
    assert "32-63" in out
    assert "exactly once" in out


def test_long_table_counts_hidden_moves(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_closed_pipe_ends_the_command_quietly() -> None:
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
