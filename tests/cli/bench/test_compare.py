"""``kvferry bench compare``: three clusters under the same load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reference.clusters import demand_gone, family, segments, wait_until
from running import heed_interrupts

from kvferry.cli.bench.compare import (
    NO_STAGING,
    VariantResult,
    as_document,
    failure_of,
    measure,
    show,
    variants_of,
)
from kvferry.cli.bench.load import LoadProgress
from kvferry.cli.load.client import LoadReply
from kvferry.cli.load.stats import summarise
from kvferry.cli.load.sweep import Load, Sweep
from kvferry.cli.main import main
from kvferry.errors import InputError
from kvferry.plan import TransferMode
from kvferry.reference.cluster.description import (
    ClusterDescription,
    WorkerSection,
    check,
    worker_options,
)
from kvferry.reference.models.find import ModelFolder
from kvferry.reference.models.tiny import make_tiny

ENOUGH_S = 240
LOAD = Load(concurrency=(1, 4), input_tokens=128, output_tokens=16, seed=1)
CLUSTER = ClusterDescription(
    transport="nixl", prefill=(WorkerSection(tp=3),), decode=(WorkerSection(page=32),)
)
COMMAND = [sys.executable, "-m", "kvferry", "bench", "compare", "--tiny"]


def test_three_variants_are_measured(tmp_path: Path) -> None:
    figure = tmp_path / "compare.svg"
    words = "--concurrency 1,2 --requests 3 --input-tokens 64 --output-tokens 4 --json"
    done = subprocess.run(
        [*COMMAND, *words.split(), "--transport", "nixl", "--plot", str(figure)],
        capture_output=True,
        text=True,
        timeout=ENOUGH_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["transport"], document["model"]) == ("nixl", "tiny")
    assert (document["error"], document["note"]) == (None, None)
    equal, slices, staged = document["variants"]
    assert [one["mode"] for one in (equal, slices, staged)] == ["runs", "slices", "staged"]
    assert (equal["prefill"], equal["decode"]) == ("TP1, page 16", "TP1, page 16")
    assert (staged["prefill"], staged["decode"]) == ("TP3, page 16", "TP1, page 16")
    for one in document["variants"]:
        # The warm-up's bytes count as well.
        assert list(one["modes"]) == [one["mode"]]
        assert one["modes"][one["mode"]] >= one["bytes"]
        assert [level["concurrency"] for level in one["levels"]] == [1, 2]
        assert all(level["requests"] == 3 and not level["failed"] for level in one["levels"])
        assert all(level["prompt_tokens"]["most"] == 64 for level in one["levels"])
    # The same prompts have the same cache, however it travels.
    assert equal["bytes"] == slices["bytes"] == staged["bytes"] > 0
    assert figure.read_bytes().count(b"<!-- different TP, staged -->") == 1


def test_an_interrupt_ends_everything() -> None:
    heed_interrupts()
    running = subprocess.Popen(
        [*COMMAND, "--requests", "1000", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        # The discovery service, the router, both workers.
        wait_until(lambda: len(family(running.pid)) >= 4, "a cluster to start")
        children = family(running.pid)
        files = segments(children)
        os.kill(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=ENOUGH_S)
    finally:
        running.kill()
        running.wait()
    assert (running.returncode, err) == (130, b"kvferry: interrupted\n")
    demand_gone(children, files)


# ---------------------------------------------------------------- what is compared


def test_variants_differ_in_prefill_only() -> None:
    equal, slices, staged = variants_of(CLUSTER, LOAD, can_stage=True)
    sections = [one.cluster.prefill[0] for one in (equal, slices, staged)]
    assert [(section.tp, section.page) for section in sections] == [(1, 32), (3, 16), (3, 16)]
    assert len({one.cluster.decode for one in (equal, slices, staged)}) == 1
    # The cache holds all requests that are in flight.
    assert sections[0].cache_tokens >= 4 * (128 + 16)
    for one, section in zip((equal, slices, staged), sections, strict=True):
        prefill, decode = one.cluster.workers()
        model = ModelFolder(Path("x"), "m")
        told = [worker_options(one.cluster, w, model, None) for w in (prefill, decode)]
        assert [options.endpoint.mode for options in told] == [section.mode, None]


def test_mapped_memory_has_two_variants() -> None:
    names = [one.name for one in variants_of(CLUSTER, LOAD, can_stage=False)]
    assert names == ["equal TP", "different TP, slices"]


def test_equal_layouts_are_refused() -> None:
    alike = ClusterDescription(prefill=(WorkerSection(page=32),), decode=(WorkerSection(),))
    with pytest.raises(InputError, match="both sides shard alike"):
        variants_of(alike, LOAD, can_stage=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--prefill tp=4", "tp=4 neither divides nor is divided by"),
        ("--prefill tp=1", "both sides shard alike"),
        ("--transport pigeon", "there is no transport 'pigeon'"),
        ("--concurrency 0", "--concurrency must be at least 1"),
        ("--plot x.txt", "end its name in png, svg, pdf"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["bench", "compare", "--tiny", *words.split()]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- when one of them fails


def test_a_cluster_that_does_not_start_is_a_result(tmp_path: Path) -> None:
    cluster = ClusterDescription(
        transport="pigeon", discovery=CLUSTER.discovery, decode=CLUSTER.decode
    )
    variant = variants_of(CLUSTER, LOAD, can_stage=True)[0]._replace(cluster=cluster)
    with LoadProgress() as bar:
        outcome = measure(variant, ModelFolder(make_tiny(tmp_path), "tiny"), LOAD, bar)
    assert outcome.sweep is None
    assert outcome.error is not None
    assert "decode-0: there is no transport 'pigeon'" in outcome.error


def outcomes() -> list[VariantResult]:
    """Return results of a success, a partial failure, and a failed start."""
    equal, slices, staged = variants_of(CLUSTER, LOAD, can_stage=True)
    fields: dict[str, Any] = {"finish": "length", "total_s": 2.0}
    good = LoadReply(stamps=[0.5, 2.0], tokens=[1, 2, 3], **fields)
    good.report = {"bytes": 2048}
    lost = LoadReply(error="the cache did not come")
    sweeps = [
        Sweep(model="m", form="token ids", levels=[summarise(1, [good, good])]),
        Sweep(model="m", form="token ids", levels=[summarise(1, [good, lost])]),
    ]
    return [
        VariantResult(equal, sweeps[0], None, 1.0, {"runs": 4096}),
        VariantResult(slices, sweeps[1], sweeps[1].failure, 1.0, {"slices": 2048}),
        VariantResult(staged, None, "prefill-0 did not start", 1.0, {}),
    ]


def test_failures_are_in_the_document() -> None:
    assert failure_of(outcomes()[:1]) is None
    sentence = failure_of(outcomes())
    assert sentence == (
        "different TP, slices: 1 of 2 requests failed; the first: the cache did not come; "
        "different TP, staged: prefill-0 did not start"
    )
    document = as_document(outcomes(), ModelFolder(Path("x"), "m"), LOAD, None)
    assert [bool(one["error"]) for one in document["variants"]] == [False, True, True]
    assert [one["bytes"] for one in document["variants"]] == [4096, 2048, 0]
    assert [one["modes"] for one in document["variants"]] == [
        {"runs": 4096},
        {"slices": 2048},
        {},
    ]
    assert document["variants"][2]["levels"] == []


def test_failures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(outcomes(), LOAD, NO_STAGING.format("shm"))
    out = capsys.readouterr().out
    assert "equal TP: TP1, page 32 → TP1, page 32; carried: 4.00 KiB as runs" in out
    assert "different TP, staged: TP3, page 16 → TP1, page 32: failed" in out
    assert "nothing to stage" in out
    assert "…" not in out


def test_decode_cannot_force_a_mode() -> None:
    staged = WorkerSection(mode=TransferMode.STAGED)
    with pytest.raises(InputError, match=r"put it into a \[\[prefill\]\] section"):
        check(ClusterDescription(decode=(staged,)), ModelFolder(Path("x"), "m"))
