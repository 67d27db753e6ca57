"""Tests in a network namespace of their own, so that they can cut a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run_apart(module: str, argument: str, limit_s: float) -> str:
    """Run a module of the tests in a new namespace; return its output. Skip where it cannot be."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("unshare and ip (util-linux and iproute2) are needed")
    cable = "ip link add name near type veth peer name far"
    made = subprocess.run(["unshare", "--net", *cable.split()], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no virtual Ethernet here: {made.stderr.decode()}")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", module, argument],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
