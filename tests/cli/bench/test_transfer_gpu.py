"""The benchmark of transfers between GPUs, as far as it can be tried without one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "transfer_gpu.py"
SMALL = "--device cpu --layers 2 --kv-heads 4 --head-dim 16 --page 8 --tokens 96 --repeats 2"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transfer_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["transfer_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_has_every_bar_once(script: ModuleType) -> None:
    cases = script.cases()
    assert len({case.name for case in cases}) == len(cases)
    bars = {case.name: (case.bar_ms, case.transport_on("cuda"), case.staging_mib) for case in cases}
    assert bars["mapped 4-1"] == (3.0, "cuda", 128)
    assert bars["mapped 1-1"] == (2.5, "cuda", 128)
    assert bars["staged-128 2-4"] == (25.0, "nixl", 128)
    assert bars["staged-1024 1-4"] == (9.0, "nixl", 1024)
    assert bars["equal 1-1"] == (30.0, "nixl", 128)
    assert {case.transport_on("cpu") for case in cases} == {"shm", "nixl", "auto"}


def test_the_cases_are_listed(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--list", "--only", "mapped"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == ["mapped 4-1", "mapped 1-4"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--only nothing", "no case has 'nothing' in its name"),
        ("--device tpu", "a device is cpu, cuda or cuda:N"),
        ("--repeats 0", "1 or more"),
        ("--tokens x", "invalid int value"),
    ],
)
def test_bad_arguments_are_refused(
    script: ModuleType, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        script.main(words.split())
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


def test_a_case_is_a_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*SMALL.split(), "--only", "auto 4-1"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["case"], line["asked"], line["chosen"]) == ("auto 4-1", "auto", "shm")
    assert (line["good"], line["repeats"], line["bytes"]) == (True, 2, 2 * 2 * 96 * 4 * 16 * 2)
    assert line["within_bar"] is (line["median_ms"] <= 3.0)
    assert line["pages"] == "fragmented"


def test_pages_can_be_contiguous(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL.split(), "--only", "equal-runs", "--pages", "contiguous"]
    assert script.main(words) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["good"], line["pages"], line["mode"]) == (True, "contiguous", "runs")
    # A piece for each of two layers of K and V.
    assert line["pieces"] == 4


def test_a_line_can_have_a_timeline(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*SMALL.split(), "--only", "auto 4-1", "--timeline"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    ranks = {step[1] for step in line["timeline"] if step[2] == "written"}
    assert ranks == {f"prefill/{rank}" for rank in range(4)}


def test_a_case_that_fails_is_a_line_too(script: ModuleType) -> None:
    args = script.arguments([*SMALL.split(), "--kv-heads", "3"])
    (case,) = (case for case in script.cases() if case.name == "mapped 4-1")
    line = script.line_of(case, args)
    assert line["good"] is False
    assert line["error"]


@pytest.mark.parametrize(("times", "ratio"), [((10.0, 10.0, 40.0), 1.0), ((40.0, 10.0, 40.0), 4.0)])
def test_the_chooser_is_compared_with_forced_modes(
    script: ModuleType, times: tuple[float, ...], ratio: float
) -> None:
    names = ("equal 1-1", "equal-runs 1-1", "equal-staged 1-1")
    lines = [{"case": n, "median_ms": ms} for n, ms in zip(names, times, strict=True)]
    (told,) = script.chooser_lines(lines)
    assert (told["ratio"], told["good"]) == (ratio, ratio <= 1.5)
    assert not list(script.chooser_lines(lines[:2]))
