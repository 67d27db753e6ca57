"""The compiled copy loop: whether it can be had, and how fast it is here."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.cli.doctor.checks.check import REPORT, Asked, Check, lacking, ok
from kvferry.cli.doctor.checks.children import Children, ProbeFailed
from kvferry.plan.units import human_seconds

AREA = "copies"
# Compiling takes some seconds on a free core, and happens once.
LIMIT_S = 60.0
# Below this share of a plain copy, something is odd.
SLOW = 0.6


def host(asked: Asked, children: Children) -> Iterator[Check]:
    """Compile or load the loop, and time it."""
    try:
        found = children.start("copy", limit_s=LIMIT_S).answer()
    except ProbeFailed as error:
        remedy = "reinstall numba: pip install --force-reinstall numba"
        yield lacking(AREA, "loop", str(error), needed=asked.on_host, remedy=remedy)
        return
    if not found["right"]:
        told = "the compiled loop copies wrong bytes on this processor"
        yield lacking(AREA, "loop", told, needed=True, remedy=REPORT)
        return
    yield ok(AREA, "loop", f"ready in {human_seconds(found['ready_s'])}")
    yield judge_speed(found["loop_bytes_per_s"], found["memcpy_bytes_per_s"])


def judge_speed(loop_bytes_per_s: float, memcpy_bytes_per_s: float) -> Check:
    """Pieces of 512 bytes against a plain copy in the same run."""
    share = loop_bytes_per_s / memcpy_bytes_per_s
    told = f"{loop_bytes_per_s / 1e9:.1f} GB/s in pieces of 512 bytes, {share:.2f} of a plain copy"
    if share >= SLOW:
        return ok(AREA, "speed", told)
    remedy = "try again when the machine is idle; `kvferry bench transfer` tells more"
    return lacking(AREA, "speed", told, needed=False, remedy=remedy)
