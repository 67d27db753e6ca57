"""Known failures of SGLang's own classes: stock 0.5.23 beside kvferry.

What is said of stock here is what docs/connectors/sglang.md says of it. Both are told that pools
are in host memory; called as a server on a CPU calls it, stock takes them for a GPU's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import HERE, environment

DONE = {"receiver": "Success", "wrong": 0}
# Every step that waits in vain waits for this long.
STUCK_S = "5"


def run(folder: Path, program: str, *flags: str, **variables: str) -> list[dict[str, Any]]:
    """What a program here says of each request."""
    log = folder / f"{program}.log"
    command = [sys.executable, str(HERE / program), *flags]
    with log.open("ab") as file:
        ended = subprocess.run(
            command,
            env={**environment(1, folder), **variables},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            timeout=300,
            check=True,
            cwd=HERE,
        )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    print(f"\n{program} {' '.join(flags)}: {' '.join(lines)}", flush=True)
    return [json.loads(line) for line in lines]


def are_done(said: list[dict[str, Any]]) -> bool:
    return all(
        DONE.items() <= each.items() and set(each["senders"]) == {"Success"} for each in said
    )


def test_issue_22145_stock_hangs_silently(folder: Path) -> None:
    """Prefill TP4 and decode TP1: its threads end, and what waits for them goes on waiting."""
    (one,) = run(folder, "classes.py", "nixl", "--prefill-tp", "4", "--patience-s", STUCK_S)
    assert one["receiver"] == "WaitingForInput"
    assert set(one["senders"]) == {"Bootstrapping"}
    assert one["wrong"] == one["of"]
    assert "not implemented safely yet" in (folder / "classes.py.log").read_text()


def test_issue_22145_one_prefill_of_four_ranks_serves_four_decodes(folder: Path) -> None:
    """Two heads for four ranks, and four targets that share every source."""
    said = run(folder, "classes.py", "kvferry", "--prefill-tp", "4", "--decodes", "4")
    assert len(said) == 4
    assert are_done(said)


def test_issue_22145_heads_split_over_four_ranks(folder: Path) -> None:
    said = run(folder, "classes.py", "kvferry", "--prefill-tp", "4", "--heads", "8")
    assert len(said) == 1
    assert are_done(said)


def test_issue_25699_a_dense_model_completes_in_both(folder: Path) -> None:
    """Stock has been corrected. With kvferry it does not matter what stands for no state."""
    for backend, flags in (("nixl", []), ("kvferry", []), ("kvferry", ["--none"])):
        said = run(folder, "classes.py", backend, *flags)
        assert len(said) == 1
        assert are_done(said)


def test_issue_22536_stock_has_no_staging_on_a_cpu(folder: Path) -> None:
    flags = {"SGLANG_DISAGG_STAGING_BUFFER": "1"}
    (one,) = run(folder, "classes.py", "nixl", "--prefill-tp", "4", **flags)
    assert "not supported on device type 'cpu'" in one["error"]


def test_issue_22536_aborts_do_not_block_the_next_request(folder: Path) -> None:
    *given_up, last = run(folder, "classes.py", "kvferry", "--prefill-tp", "4", "--aborts", "8")
    assert len(given_up) == 8
    assert all(each["receiver"] == "Failed" for each in given_up)
    assert all(set(each["senders"]) == {"Failed"} for each in given_up)
    assert are_done([last])
