"""One prefill worker whose memory can be mapped and one whose can't, at the same time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reference.driving import PROMPTS
from reference.working import Alone

from kvferry.reference.models.tiny import TinyKind
from kvferry.transports.nixl.package import missing

HERE = Path(__file__).parent
LIMIT_S = 180.0
MAY = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x48020000))"


def obstacle() -> str | None:
    """Why name spaces can't be made here."""
    if not (shutil.which("unshare") and shutil.which("ip") and shutil.which("mount")):
        return "unshare, ip and mount (util-linux and iproute2) are needed"
    if subprocess.run([sys.executable, "-c", MAY], capture_output=True, check=False).returncode:
        return "making network, mount and IPC name spaces is not permitted here"
    cable = "ip link add name near type veth peer name far"
    made = subprocess.run(["unshare", "--net", *cable.split()], capture_output=True, check=False)
    return f"no virtual cables here: {made.stderr.decode()}" if made.returncode else missing()


def test_each_prefill_worker_is_reached_by_its_best_transport(
    models: dict[TinyKind, Path], tmp_path: Path
) -> None:
    why = obstacle()
    if why:
        pytest.skip(why)
    folder = models[TinyKind.LLAMA]
    words = [sys.executable, "-m", "reference.far", folder, tmp_path / "key"]
    try:
        done = subprocess.run(
            ["unshare", "--net", "--mount", *map(str, words)],
            cwd=HERE.parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"it did not end within {LIMIT_S} s; it printed: {late.stderr!r}")
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["links"] == {
        "near": {"decode/0": "shm"},
        "far": {"decode/0": "nixl"},
        "decode": {"near/0": "shm", "far/0": "nixl"},
    }, done.stderr[-8000:]
    prompts = [(i, *prompt) for i in range(2) for prompt in PROMPTS]
    assert told["sources"] == ["transferred"] * len(prompts)
    assert told["tokens"] == Alone(models)(TinyKind.LLAMA, prompts)
