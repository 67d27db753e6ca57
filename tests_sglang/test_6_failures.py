"""Known failures of SGLang's NIXL backend, and the same cases with kvferry.

docs/connectors/sglang.md describes these failures of SGLang. The tests say that the pools are in
host memory; a server on a CPU does not, and SGLang's backend then takes them for GPU memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sglang
from servers import HERE, environment

DONE = {"receiver": "Success", "wrong": 0}
# Timeout of steps that never complete.
STUCK_S = "5"


def run(folder: Path, program: str, *flags: str, **variables: str) -> list[dict[str, Any]]:
    """Run a program of this folder, and return its lines of JSON."""
    log = folder / f"{program}.log"
    command = [sys.executable, str(HERE / program), *flags]
    with log.open("ab") as file:
        process = subprocess.run(
            command,
            env={**environment(1, folder), **variables},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            timeout=300,
            check=True,
            cwd=HERE,
        )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    print(f"\n{program} {' '.join(flags)}: {' '.join(lines)}", flush=True)
    return [json.loads(line) for line in lines]


def all_done(results: list[dict[str, Any]]) -> bool:
    """Return whether all requests succeeded on all ranks, with the right bytes."""
    return all(
        DONE.items() <= result.items() and set(result["senders"]) == {"Success"}
        for result in results
    )


def test_issue_22145_sglangs_backend_hangs_silently(folder: Path) -> None:
    """From TP4 to TP1 its threads end, and the receiver and the senders wait for them."""
    (result,) = run(folder, "backends.py", "nixl", "--prefill-tp", "4", "--timeout-s", STUCK_S)
    assert result["receiver"] == "WaitingForInput"
    assert set(result["senders"]) == {"Bootstrapping"}
    assert result["wrong"] == result["of"]
    assert "not implemented safely yet" in (folder / "backends.py.log").read_text()


def test_issue_22145_one_prefill_of_four_ranks_serves_four_decodes(folder: Path) -> None:
    """Four prefill ranks have two heads, and every source serves four targets."""
    results = run(folder, "backends.py", "kvferry", "--prefill-tp", "4", "--decodes", "4")
    assert len(results) == 4
    assert all_done(results)


def test_issue_22145_heads_split_over_four_ranks(folder: Path) -> None:
    results = run(folder, "backends.py", "kvferry", "--prefill-tp", "4", "--heads", "8")
    assert len(results) == 1
    assert all_done(results)


def test_issue_25699_a_dense_model_completes_in_both(folder: Path) -> None:
    """SGLang has corrected it. kvferry accepts both None and an empty list for no state."""
    for backend, flags in (("nixl", []), ("kvferry", []), ("kvferry", ["--none"])):
        results = run(folder, "backends.py", backend, *flags)
        assert len(results) == 1
        assert all_done(results)


@pytest.mark.skipif(sglang.__version__ != "0.5.23", reason="older versions fail in torch.cuda")
def test_issue_22536_sglangs_backend_has_no_staging_on_a_cpu(folder: Path) -> None:
    flags = {"SGLANG_DISAGG_STAGING_BUFFER": "1"}
    (result,) = run(folder, "backends.py", "nixl", "--prefill-tp", "4", **flags)
    assert "not supported on device type 'cpu'" in result["error"]


def test_issue_22536_aborts_do_not_block_the_next_request(folder: Path) -> None:
    *aborted, last = run(folder, "backends.py", "kvferry", "--prefill-tp", "4", "--aborts", "8")
    assert len(aborted) == 8
    assert all(result["receiver"] == "Failed" for result in aborted)
    assert all(set(result["senders"]) == {"Failed"} for result in aborted)
    assert all_done([last])


def test_an_untested_version_with_all_hooks_runs_with_a_warning(folder: Path) -> None:
    results = run(folder, "backends.py", "kvferry", "--version", "0.5.99")
    assert len(results) == 1
    assert all_done(results)
    assert "untested-version sglang=0.5.99" in (folder / "backends.py.log").read_text()
