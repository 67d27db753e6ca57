"""``kvferry sim``: its documents, its text and its errors."""

from __future__ import annotations

import json

import pytest

from kvferry.cli.main import main
from kvferry.testing.sim import BREAKS, SCENARIOS


def sim(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    status = main(["sim", *words.split()])
    return status, capsys.readouterr().out


def test_json_document_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = sim(capsys, "--seeds 3 --first-seed 7 --json")
    got = json.loads(out)
    assert status == 0
    assert (got["seeds"], got["violations"]) == (3, [])
    assert got["rooms"] > 0
    assert got["steps"] > 0
    assert isinstance(got["faults"], dict)
    assert got["scenarios"] == dict.fromkeys(SCENARIOS, "pass")


def test_json_document_of_one_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = sim(capsys, "--scenario C7 --seeds 2 --json")
    got = json.loads(out)
    assert (status, got["seeds"], got["scenarios"]) == (0, 2, {"C7": "pass"})


def test_json_document_of_a_break(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = sim(capsys, "--break close-early --json")
    got = json.loads(out)
    assert (status, got["caught"], got["after_seeds"]) == (0, True, 1)
    assert got["violations"][0]["seed"] == 0
    status, out = sim(capsys, "--break count-own-stall --seeds 1 --first-seed 0 --json")
    assert (status, json.loads(out)["caught"]) == (1, False)


def test_list_has_scenarios_and_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    got = json.loads(sim(capsys, "--list --json")[1])
    assert list(got["scenarios"]) == list(SCENARIOS)
    assert list(got["breaks"]) == list(BREAKS)
    assert "release-at-abort" in sim(capsys, "--list")[1]


def test_text_output(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = sim(capsys, "--seeds 2")
    assert status == 0
    assert "every promise held" in out
    assert "caught after" in sim(capsys, "--break shared-key")[1]


@pytest.mark.parametrize(
    "words",
    [
        "--seeds x",
        "--seeds 0",
        "--scenario Z9",
        "--break nothing",
        "--scenario C1 --break overcommit",
    ],
)
def test_bad_arguments_exit_with_status_2(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert sim(capsys, words)[0] == 2
