"""Frames get through soon after a network partition ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
# By then the kernel would retransmit every six seconds only.
PARTITION_S = 8.0
# The target is 2 s; a busy machine may take longer to run both ends.
SOON_S = 4.0


def obstacle() -> str | None:
    """Return why network namespaces cannot be made here; None if they can."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return "unshare and ip (util-linux and iproute2) are needed"
    cable = "ip link add name near type veth peer name far"
    made = subprocess.run(["unshare", "--net", *cable.split()], capture_output=True, check=False)
    return f"no virtual Ethernet here: {made.stderr.decode()}" if made.returncode else None


def test_frames_arrive_soon_after_a_partition() -> None:
    why = obstacle()
    if why:
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "endpoint.network_partition", str(PARTITION_S)],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < SOON_S
