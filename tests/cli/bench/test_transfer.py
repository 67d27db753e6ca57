"""``kvferry bench transfer`` and ``control``: small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.cli.main import main

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
SHAPE = "--layers 2 --kv-heads 4 --head-dim 16 --dtype bfloat16 --tokens 96"


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.out.splitlines()[-1])
        assert isinstance(document, dict)
        return document


def bench(capsys: pytest.CaptureFixture[str], words: str) -> Ran:
    status = main(["bench", *words.split()])
    return Ran(status, *capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "path", "pieces"),
    [
        # Two layers of K and V, 96 tokens, to each of two ranks.
        ("--transport shm --prefill tp=1 --decode tp=2", "slices", 2 * 2 * 96 * 2),
        # The default is auto, which takes shared memory on one host.
        ("--prefill tp=1 --decode tp=2", "slices", 2 * 2 * 96 * 2),
        ("--transport nixl --prefill tp=1 --decode tp=2 --mode slices", "slices", 2 * 2 * 96 * 2),
        # One slot for each target.
        ("--transport nixl --prefill tp=1 --decode tp=2 --mode staged", "staged", 2),
        ("--transport mooncake --prefill tp=2 --decode tp=1 --mode staged", "staged", 2),
    ],
)
def test_a_transfer_is_measured_and_verified(
    capsys: pytest.CaptureFixture[str], words: str, path: str, pieces: int
) -> None:
    done = bench(capsys, f"transfer {SHAPE} --repeat 2 --json {words}")
    assert done.status == 0, done.err
    report = done.document
    assert report["verified"] is True
    assert report["mode"] == path
    assert report["pieces"] == pieces
    assert report["bytes"] == 2 * 2 * 96 * 4 * 16 * 2
    seconds = report["seconds"]
    assert len(seconds["all"]) == 2
    assert min(seconds["all"]) <= seconds["median"] <= max(seconds["all"])
    assert report["staging_bytes"] <= 64 << 20
    assert (report["staging_bytes"] == 0) == ("shm" in words)
    asked = words.split()[1] if "--transport" in words else "auto"
    assert (report["transport"], report["chosen"]) == (asked, asked if asked != "auto" else "shm")


def test_groups_with_pages_of_different_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"--model {CONFIGS / 'gpt-oss-20b.json'} --tokens 96 --prefill page=16,page.swa=64 "
        f"--decode tp=2,page=32,page.kv=4 --transport shm --repeat 1 --json"
    )
    done = bench(capsys, f"transfer {words}")
    assert (done.status, done.document["verified"]) == (0, True), done.err


def test_contiguous_pages_go_in_one_piece_for_each_layer_and_tensor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--transport nixl --prefill tp=1 --decode tp=1 --mode runs --repeat 2 --json"
    pieces = {}
    for pages in ("fragmented", "contiguous"):
        done = bench(capsys, f"transfer {SHAPE} {words} --pages {pages}")
        assert done.status == 0, done.err
        assert (done.document["verified"], done.document["pages"]) == (True, pages)
        pieces[pages] = done.document["pieces"]
    assert pieces["contiguous"] == 2 * 2 < pieces["fragmented"]


def test_the_timeline_has_the_last_room_at_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--transport nixl --prefill tp=2 --decode tp=1 --mode staged --repeat 2 --timeline"
    done = bench(capsys, f"transfer {SHAPE} {words} --json")
    assert done.status == 0, done.err
    steps = done.document["timeline"]
    times = [step["ms"] for step in steps]
    assert times == sorted(times)
    at = {(step["rank"], step["step"], step.get("peer", "")): step["ms"] for step in steps}
    for rank in ("prefill/0", "prefill/1"):
        # The first push is at 0, and the bytes go from there to the pages.
        way = [
            at[rank, "gathered", "decode/0"],
            at[rank, "written", "decode/0"],
            at["decode/0", "arrived", rank],
            at["decode/0", "scattered", rank],
            at["decode/0", "done", ""],
        ]
        assert way == sorted(way)
        assert way[0] > 0
    done = bench(capsys, f"transfer {SHAPE} {words}")
    assert any(line.split()[1:] == ["decode/0", "done"] for line in done.out.splitlines()[-40:])


def test_a_mode_that_is_not_possible_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    done = bench(capsys, f"transfer {SHAPE} --prefill tp=1 --decode tp=2 --mode runs")
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert "runs is not open" in done.err


def test_layouts_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    done = bench(capsys, f"transfer {SHAPE} --prefill tp=3 --decode tp=2 --json")
    assert done.status == 3
    assert "tp-does-not-fit-units" in done.out


def test_an_unknown_transport_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    done = bench(capsys, f"transfer {SHAPE} --prefill tp=1 --decode tp=2 --transport pigeon")
    assert done.status == 2
    assert "pigeon" in done.err


def test_rooms_of_one_page_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    done = bench(capsys, "control --concurrency 1,4 --rooms 20 --json")
    assert done.status == 0, done.err
    levels = done.document["levels"]
    assert [level["concurrency"] for level in levels] == [1, 4]
    assert all(level["rooms"] == 20 and 0 < level["p50_ms"] <= level["p99_ms"] for level in levels)


def test_a_proof_of_all_content_changes_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--transport shm --prefill tp=2 --decode tp=1 --repeat 1 --proof full"
    done = bench(capsys, f"transfer {SHAPE} --json {words}")
    assert done.status == 0, done.err
    assert done.document["verified"] is True
    assert done.document["proof"] == "full"


@pytest.mark.parametrize("fault", ["flip-byte", "swap-layers", "swap-kv", "stale-page"])
def test_damaged_content_is_refused_and_named(
    capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    words = f"--transport shm --prefill tp=2 --decode tp=1 --inject {fault}"
    done = bench(capsys, f"transfer {SHAPE} --json {words}")
    assert done.status == 1
    assert done.document["code"] == "content-corrupt"
    assert "group 'kv' layers" in done.document["message"]


def test_damage_without_a_proof_is_not_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--transport shm --prefill tp=1 --decode tp=1 --inject short-write --proof off"
    done = bench(capsys, f"transfer {SHAPE} {words}")
    assert done.status == 1
    assert "not noticed" in done.out


def test_an_impossible_fault_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--transport shm --prefill tp=1 --decode tp=1 --inject drop-state"
    done = bench(capsys, f"transfer {SHAPE} {words}")
    assert done.status == 2
    assert "drop-state is impossible" in done.err
    staged = bench(capsys, f"transfer {SHAPE} {words} --mode staged")
    assert staged.status == 2
