"""``kvferry plan --load``: the document, the table, the figure, and refused flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import SHAPE, document

from kvferry.cli.main import main

SIDES = f"--prefill tp=4 --decode tp=8 {SHAPE}"
LOAD = "--cost-model rdma-400g --load 20,4000,300 --instances 8x4"


def test_a_load_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    got = document(capsys, f"{SIDES} {LOAD}")
    assert got["tokens"] == 4000
    seen = got["capacity"]
    assert seen["stable"] is True
    assert seen["saturates_first"] == "prefill compute"
    # 8 instances of 20,000 tokens/s compute 4,000 tokens each.
    assert seen["limits_per_s"]["prefill compute"] == pytest.approx(40)
    assert seen["busy"]["prefill compute"] == pytest.approx(0.5)
    assert seen["added_s"]["p50"] >= got["predicted_s"] * 0.999
    assert seen["added_s"]["p50"] <= seen["added_s"]["p99"] <= seen["ready_s"]["p99"]
    sent = seen["link_bytes_per_s"]["prefill_rank"]
    assert sent == pytest.approx(20 / 8 * got["bytes"] / 4)
    assert seen["pinned_bytes"]["prefill"] < seen["pinned_bytes"]["decode"]


def test_messages_add_to_every_hand_off(capsys: pytest.CaptureFixture[str]) -> None:
    free, slow = (
        document(capsys, f"{SIDES} {LOAD.replace('400g', f'400g,room_us={cost}')}")
        for cost in (1e-6, 5000)
    )
    added = [one["capacity"]["added_s"]["p50"] for one in (free, slow)]
    assert added[1] - added[0] == pytest.approx(5e-3)
    assert free["predicted_s"] == slow["predicted_s"]


def test_the_table_names_what_is_full_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {SIDES} {LOAD}".split()) == 0
    printed = capsys.readouterr().out
    assert "20 requests/s of 4000 + 300 tokens" in printed
    assert "40.0 requests/s  first" in printed
    assert "added to the time to first token" in printed


def test_an_overload_is_said_instead_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {SIDES} {LOAD.replace('20,', '50,')}".split()) == 0
    printed = capsys.readouterr().out
    assert "too much: prefill compute is full, so waits grow without bound" in printed
    assert "hand-offs in flight" not in printed


def test_the_figure_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.svg"
    assert main(f"plan {SIDES} {LOAD} --plot {path}".split()) == 0
    assert "Added to the time to first token" in path.read_text() or "<svg" in path.read_text()
    assert f"picture: {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--load 20,4000", "--load must be requests per second, input and output tokens"),
        ("--load x,4000,3", "--load"),
        ("--load 20,4000,300 --instances 8", "--instances must be as in 4x8"),
        ("--instances 8x4", "--instances need a load; give --load"),
        ("--load 20,4000,300 --cache-tokens 100", "give a larger one"),
        ("--load 20,4000,300 --plot load.txt", "end its name in png, svg, pdf"),
    ],
)
def test_a_bad_load_is_refused_with_a_remedy(
    words: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"plan {SIDES} {words}".split()) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
