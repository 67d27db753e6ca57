"""Transfers between GPU pools of real processes: mapped, staged and equal TP, each with a goal.

    .venv/bin/python benchmarks/transfer_gpu.py                    all cases, on one GPU
    .venv/bin/python benchmarks/transfer_gpu.py --only mapped      cases whose name contains this
    .venv/bin/python benchmarks/transfer_gpu.py --list             list the cases

Qwen3-32B's cache (64 layers, 8 KV heads of 128, bf16, pages of 64) for 8192 tokens, 2.1 GB. Every
rank is a process. Pages are in random order, or consecutive on both sides with ``--pages
contiguous``. Each case prints one line of JSON: the median time from the first push to the end
at the last target, the transport and mode (``chosen``, ``mode``), the goal (``bar_ms``), and
whether every byte was right. If a case was also measured with each mode, a last line compares the
chooser's mode with the best (``chooser``). The exit status is 1 if bytes were wrong, a case failed,
or the chooser's mode took more than 1.5 times as long as the best. Goals do not affect it: they are
for an H200. ``--timeline`` adds each step of the last repetition at every rank: milliseconds since
the first push, rank, step, milliseconds that it took, peer, bytes.

``--device cpu`` with small sizes runs the same cases over shm and NIXL on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvferry.cli.bench.transfer import (
    TIMEOUT_S,
    PageOrder,
    TransferJob,
    TransferReport,
    measure,
)
from kvferry.endpoint.config import EndpointConfig
from kvferry.errors import KvferryError
from kvferry.layout import Layout, Parallel, attention
from kvferry.plan import Request, TransferMode, check, reshard
from kvferry.plan.units import MIB
from kvferry.regions import Device
from kvferry.testing.fleet import RankError

# How much longer than the best mode the chosen mode may take.
MOST_WRONG = 1.5


class GpuCase(NamedTuple):
    """One measurement. ``transport`` None is the one that maps the device's memory.

    A few large slots carry one long request in the least time, because of the cost of each slot.
    By default a GPU's staging has three slots or more, which serve several short requests;
    ``staging_mib`` None is this default.
    """

    name: str
    prefill: int
    decode: int
    transport: str | None
    bar_ms: float | None = None
    staging_mib: int | None = 128
    mode: TransferMode | None = None
    slot_mib: int | None = None

    def transport_on(self, device: str) -> str:
        """Return the transport for pools on that device."""
        return self.transport or ("shm" if Device.parse(device).is_host else "cuda")


def cases() -> list[GpuCase]:
    """Return the cases with goals, and equal TP with each mode."""
    pairs = ((4, 1), (1, 4), (2, 4))
    mapped = {(4, 1): 3.0, (1, 4): 3.5, (2, 4): 3.5, (1, 1): 2.5}
    return [
        *(GpuCase(f"mapped {p}-{d}", p, d, None, bar) for (p, d), bar in mapped.items()),
        *(GpuCase(f"staged-128 {p}-{d}", p, d, "nixl", 25.0, slot_mib=128) for p, d in pairs),
        *(GpuCase(f"staged-1024 {p}-{d}", p, d, "nixl", 9.0, 1024, slot_mib=512) for p, d in pairs),
        GpuCase("equal 1-1", 1, 1, "nixl", 30.0, slot_mib=128),
        # As long as SGLang's manager takes with a prepared list of the same descriptors.
        GpuCase("equal-default 1-1", 1, 1, "nixl", 45.0, None),
        *(GpuCase(f"equal-{mode} 1-1", 1, 1, "nixl", None, 128, mode, 128) for mode in MODES),
        GpuCase("auto 4-1", 4, 1, "auto", 3.0),
        GpuCase("auto 1-1", 1, 1, "auto", 2.5),
    ]


# With equal TP, slices are runs.
MODES = (TransferMode.RUNS, TransferMode.STAGED)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument(
        "--slot-mib", type=int, help="size of a staging slot (each case has its own)"
    )
    parser.add_argument(
        "--pages",
        choices=list(map(str, PageOrder)),
        default="fragmented",
        help="order on both sides (fragmented)",
    )
    parser.add_argument(
        "--timeline", action="store_true", help="list each step of the last repetition"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="list the cases")
    args = parser.parse_args(words)
    if min(getattr(args, name.replace("-", "_")) for name in SIZES) < 1:
        parser.error("sizes and repeats must be 1 or more")
    if not chosen_cases(args.only):
        parser.error(f"no case has {args.only!r} in its name; see --list")
    try:
        Device.parse(args.device)
    except KvferryError as error:
        parser.error(str(error))
    return args


SIZES = {"layers": 64, "kv-heads": 8, "head-dim": 128, "page": 64, "tokens": 8192, "repeats": 15}


def chosen_cases(only: str) -> list[GpuCase]:
    return [case for case in cases() if only in case.name]


def main(words: Sequence[str] | None = None) -> int:
    args = arguments(words)
    if args.list:
        print("\n".join(case.name for case in chosen_cases(args.only)))
        return 0
    lines: list[dict[str, Any]] = []
    for case in chosen_cases(args.only):
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        lines.append(line_of(case, args))
        print(json.dumps(lines[-1]), flush=True)
    for line in chooser_lines(lines):
        lines.append(line)
        print(json.dumps(line), flush=True)
    return 0 if all(line["good"] for line in lines) else 1


def job_of(case: GpuCase, args: argparse.Namespace) -> TransferJob:
    spec = attention(layers=args.layers, kv_heads=args.kv_heads, head_dim=args.head_dim)
    sides = [
        Layout(spec, Parallel(tp=tp), page_tokens=args.page) for tp in (case.prefill, case.decode)
    ]
    plan = reshard(*sides)
    check(plan)
    slot_mib = args.slot_mib or case.slot_mib
    config = EndpointConfig(
        staging_bytes=case.staging_mib * MIB if case.staging_mib else None,
        slot_bytes=slot_mib * MIB if slot_mib else None,
        mode=case.mode,
        deadline_s=TIMEOUT_S,
    )
    transport, device = case.transport_on(args.device), str(Device.parse(args.device))
    request, how = Request(args.tokens), (args.tokens, args.repeats, config)
    pages = PageOrder(args.pages)
    return TransferJob(plan, request, transport, device, *how, pages, args.timeline)


def line_of(case: GpuCase, args: argparse.Namespace) -> dict[str, Any]:
    """Run a case; return its line, also if it fails."""
    asked: dict[str, Any] = {
        "case": case.name,
        "prefill": f"tp={case.prefill}",
        "decode": f"tp={case.decode}",
        "asked": case.transport_on(args.device),
        "bar_ms": case.bar_ms,
    }
    try:
        return asked | measured(case, measure(job_of(case, args), show=False))
    except (KvferryError, RankError) as error:
        return asked | {"good": False, "error": str(error)[:2000]}


def measured(case: GpuCase, report: TransferReport) -> dict[str, Any]:
    median_ms, all_s = 1e3 * report.seconds["median"], report.seconds["all"]
    steps = [msgspec.structs.astuple(step) for step in report.timeline]
    return {
        "good": report.verified,
        "median_ms": round(median_ms, 3),
        "least_ms": round(1e3 * min(all_s), 3),
        "most_ms": round(1e3 * max(all_s), 3),
        "within_bar": None if case.bar_ms is None else median_ms <= case.bar_ms,
        "chosen": report.chosen,
        "mode": report.mode,
        "pages": report.pages,
        "gb_per_s": round(report.gb_per_s, 2),
        "plain_copy_ms": round(1e3 * report.memcpy_seconds, 3),
        "bytes": report.bytes,
        "pieces": report.pieces,
        "staging_bytes": report.staging_bytes,
        "first_ms": round(1e3 * report.first_seconds, 3),
        "repeats": len(all_s),
        "all_ms": [round(1e3 * seconds, 1) for seconds in all_s],
        **({"timeline": steps} if steps else {}),
    }


def chooser_lines(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare the chooser with the best mode, if each mode was measured."""
    times = {line["case"]: line["median_ms"] for line in lines if "median_ms" in line}
    forced = [times.get(f"equal-{mode} 1-1") for mode in MODES]
    chosen = times.get("equal 1-1")
    if chosen is None or None in forced:
        return
    ratio = chosen / min(ms for ms in forced if ms is not None)
    yield {"case": "chooser", "ratio": round(ratio, 3), "good": ratio <= MOST_WRONG}


if __name__ == "__main__":
    raise SystemExit(main())
