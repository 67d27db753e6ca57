"""``kvferry bench transfer``: one request's cache between real processes, every byte verified."""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvferry.cli.bench.inject import run_injected
from kvferry.cli.bench.timeline import TimelineStep, print_timeline, timeline_of
from kvferry.cli.needs import demand_transport
from kvferry.cli.parsing import whole
from kvferry.cli.printing import EXIT_REFUSED, print_document, print_refusal
from kvferry.cli.sides import Sides, both_sides, read_side, read_spec
from kvferry.endpoint.config import EndpointConfig, ProofMode
from kvferry.errors import InputError, Refused
from kvferry.plan import PRESETS, Plan, Request, TransferMode, check, estimate, reshard
from kvferry.plan.units import MIB, human_bytes, human_seconds
from kvferry.protocol.outcome import Status
from kvferry.regions import Device
from kvferry.testing.faulty_transport import ContentFault
from kvferry.testing.fleet import Fleet, FleetSide, RankProcess

TIMEOUT_S = 120.0
READY_S = 30.0
# Every source has received its command to push by then.
START_S = 5e-3


class PageOrder(StrEnum):
    """The pages of the request on both sides: in random order, or consecutive."""

    FRAGMENTED = "fragmented"
    CONTIGUOUS = "contiguous"


class TransferReport(msgspec.Struct, kw_only=True):
    """The measurements of one job."""

    transport: str
    chosen: str
    prefill: str
    decode: str
    device: str
    tokens: int
    pages: str
    mode: str
    bytes: int
    seconds: dict[str, Any]
    first_seconds: float
    gb_per_s: float
    memcpy_seconds: float
    memcpy_ratio: float
    pieces: int
    staging_bytes: int
    verified: bool
    proof: str
    timeline: list[TimelineStep] = []


class TransferJob(NamedTuple):
    """The transfer to measure."""

    plan: Plan
    request: Request
    transport: str
    device: str
    chunk: int
    repeat: int
    config: EndpointConfig
    pages: PageOrder
    timeline: bool = False
    fault: ContentFault | None = None


def run(args: argparse.Namespace) -> int:
    """Measure a transfer and print the report."""
    job = _read(args)
    if isinstance(job, int):
        return job
    if job.fault is not None:
        return run_injected(job, job.fault, as_json=args.json)
    report = measure(job, show=not args.json)
    if args.json:
        print_document(msgspec.to_builtins(report))
    else:
        _print(report)
    return 0 if report.verified else 1


def _read(args: argparse.Namespace) -> TransferJob | int:
    prefill = read_side(args.prefill, "--prefill")
    decode = read_side(args.decode, "--decode", extra={"prefix": whole("prefix", least=0)})
    request = Request(whole("--tokens")(args.tokens), decode.prefix)
    sides = both_sides(lambda side: read_spec(args, side.dtype), prefill, decode)
    try:
        if not isinstance(sides, Sides):
            raise Refused(sides)
        plan = reshard(*sides)
    except Refused as refused:
        print_refusal(refused.reasons, heading="This can't work:", as_json=args.json)
        return EXIT_REFUSED
    check(plan)
    demand_transport(args.transport)
    mode = None if args.mode == "auto" else TransferMode(args.mode)
    fault = ContentFault(args.inject) if args.inject else None
    if fault is not None and fault.needs_pieces:
        mode = mode or TransferMode.SLICES
        if mode is TransferMode.STAGED:
            raise InputError(f"{fault} can't be made in staged writes; use another --mode")
    proof = args.proof or (ProofMode.SAMPLED if fault is None else ProofMode.FULL)
    # Raises InputError if the plan does not allow the mode.
    estimate(plan, request, PRESETS["nixl-host"], override=mode)
    sizes = {
        name: whole(flag)(text) * MIB
        for name, flag, text in (
            ("staging_bytes", "--staging-mib", args.staging_mib),
            ("slot_bytes", "--slot-mib", args.slot_mib),
        )
        if text
    }
    config = msgspec.structs.replace(
        EndpointConfig(mode=mode, deadline_s=TIMEOUT_S, proof=ProofMode(proof)), **sizes
    )
    chunk = whole("--chunk")(args.chunk) if args.chunk else request.num_tokens
    repeat = whole("--repeat")(args.repeat)
    pages = PageOrder(args.pages)
    where = args.transport, args.device
    return TransferJob(plan, request, *where, chunk, repeat, config, pages, args.timeline, fault)


# ---------------------------------------------------------------- measuring


def measure(job: TransferJob, *, show: bool) -> TransferReport:
    """Start a process per rank and repeat the transfer."""
    tokens = job.request.num_tokens
    sides = [
        FleetSide(name, layout, 2 * (-(-tokens // layout.smallest_page)), job.config)
        for name, layout in (("prefill", job.plan.source), ("decode", job.plan.target))
    ]
    with Progress(transient=True, disable=not show, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting a process per rank", total=job.repeat + 3)
        fragmented = job.pages is PageOrder.FRAGMENTED
        with Fleet(
            *sides, transport=job.transport, device=job.device, fragmented=fragmented
        ) as fleet:
            transfer = _RepeatedTransfer(
                job, fleet, lambda text: progress.update(task, description=text)
            )
            progress.advance(task)
            first_s, good = transfer.carry(0, verify=True)
            progress.advance(task)
            before = transfer.carried()
            ceiling = _ceiling(job, fleet)
            all_s, copies_s = [], []
            for number in range(1, job.repeat + 1):
                copies_s.append(ceiling())
                seconds, right = transfer.carry(number, verify=number == job.repeat)
                all_s.append(seconds)
                good = good and right
                progress.advance(task)
            pieces, num_bytes = map(operator.sub, transfer.carried(), before)
            # The mode that carried most of the bytes.
            mode = max(TransferMode, key=lambda mode: num_bytes[mode])
            timed = _TimedTransfers(
                first_s, all_s, copies_s, pieces.total(), mode, good, transfer.timeline
            )
            return _report(job, fleet, timed)


def _ceiling(job: TransferJob, fleet: Fleet) -> Callable[[], float]:
    """Return a function that times a plain copy of the same bytes in warm memory."""
    num_bytes = job.plan.payload_bytes(job.request)
    if not Device.parse(job.device).is_host:
        return lambda: float(fleet.targets["decode"][0].ask("plain_copy_s", num_bytes))
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)

    def seconds() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    return seconds


class _RepeatedTransfer:
    """Carries the same request repeatedly."""

    def __init__(self, job: TransferJob, fleet: Fleet, show: Callable[[str], None]) -> None:
        self._job = job
        self._fleet = fleet
        self._targets = fleet.targets["decode"]
        self._show = show
        # Steps of the latest transfer, if the job asks for them.
        self.timeline: list[TimelineStep] = []

    def carry(self, number: int, *, verify: bool) -> tuple[float, bool]:
        """Return the seconds from the common push to the last target's end, and the verdict.

        The verdict is whether every byte is right; True without ``verify``.
        """
        job, fleet, room = self._job, self._fleet, f"bench-{number}"
        tokens = job.request.num_tokens
        self._show(f"repetition {number} of {job.repeat}" if number else "first transfer")
        if verify:
            fleet.all(self._targets, "clear")
            fleet.fill(room, number, tokens)
        else:
            fleet.place(room, tokens)
        fleet.receive(room, "decode", job.request, TIMEOUT_S)
        fleet.all(fleet.sources, "open", room, TIMEOUT_S)
        if number:
            _wait_for_offers(room, fleet.sources)
            # Engines prepare a chunk when they begin to compute it.
            fleet.all(fleet.sources, "prepare", room, (0, min(job.chunk, tokens)))
        how = job.chunk, b"first token", None, time.monotonic() + START_S
        began = min(fleet.all(fleet.sources, "push_all", room, tokens, *how))
        fleet.demand_done(room, [*self._targets, *fleet.sources], TIMEOUT_S)
        ended = max(fleet.all(self._targets, "ended", room))
        good = True
        if verify:
            self._show("comparing every byte")
            problems = fleet.all(self._targets, "problem", room, number, job.request)
            good = not any(problems)
        fleet.all([*self._targets, *fleet.sources], "wait_released", room, TIMEOUT_S)
        if job.timeline:
            self.timeline = timeline_of(fleet.all(fleet.ranks, "trace", room), began)
        fleet.forget(room, "decode")
        return ended - began, good

    def carried(self) -> tuple[Counter[TransferMode], Counter[TransferMode]]:
        """Return the pieces and bytes that all sources have written so far, by mode."""
        pieces, num_bytes = Counter[TransferMode](), Counter[TransferMode]()
        for stats in self._fleet.all(self._fleet.sources, "stats"):
            for mode in TransferMode:
                pieces[mode] += stats.modes[mode].pieces
                num_bytes[mode] += stats.modes[mode].num_bytes
        return pieces, num_bytes


def _wait_for_offers(room: str, sources: list[RankProcess]) -> None:
    """Wait for the offers; in a running system they arrive while prefill computes."""
    give_up = time.monotonic() + READY_S
    while any(source.ask("status", room) == Status.CONNECTING for source in sources):
        if time.monotonic() > give_up:
            raise InputError(
                f"the targets made no offer within {READY_S:g} s; try again on an idle machine"
            )
        time.sleep(0.002)


class _TimedTransfers(NamedTuple):
    first_s: float
    all_s: list[float]
    copies_s: list[float]
    num_pieces: int
    mode: TransferMode
    verified: bool
    timeline: list[TimelineStep]


def _report(job: TransferJob, fleet: Fleet, timed: _TimedTransfers) -> TransferReport:
    num_bytes = job.plan.payload_bytes(job.request)
    links: list[dict[str, str]] = fleet.all(fleet.sources, "links")
    median, memcpy_s = map(statistics.median, (timed.all_s, timed.copies_s))
    return TransferReport(
        transport=job.transport,
        chosen="+".join(sorted({name for one in links for name in one.values()})),
        prefill=str(job.plan.source),
        decode=str(job.plan.target),
        device=job.device,
        tokens=job.request.num_tokens,
        pages=str(job.pages),
        mode=str(timed.mode),
        bytes=num_bytes,
        seconds={"median": median, "all": timed.all_s},
        first_seconds=timed.first_s,
        gb_per_s=num_bytes / median / 1e9,
        memcpy_seconds=memcpy_s,
        memcpy_ratio=median / memcpy_s,
        pieces=timed.num_pieces // job.repeat,
        staging_bytes=max(fleet.all(fleet.ranks, "staging_bytes")),
        verified=timed.verified,
        proof=str(job.config.proof),
        timeline=timed.timeline,
    )


def _print(report: TransferReport) -> None:
    all_s = report.seconds["all"]
    spread = f"{human_seconds(min(all_s))} to {human_seconds(max(all_s))}"
    print(f"{report.prefill}  →  {report.decode}, {report.tokens} tokens over {report.chosen}")
    print(f"  pages are {report.pages}")
    print(f"  {human_bytes(report.bytes)} by {report.mode} in {report.pieces:,} pieces")
    print(f"  {human_seconds(report.seconds['median'])} ({spread}), {report.gb_per_s:.2f} GB/s")
    print(f"  first transfer {human_seconds(report.first_seconds)}")
    print(
        f"  a plain copy of the same bytes takes {human_seconds(report.memcpy_seconds)}: "
        f"{report.memcpy_ratio:.2f} times that"
    )
    print(f"  proof of content: {report.proof}")
    print(f"  staging {human_bytes(report.staging_bytes)} for each endpoint at most")
    print("  every byte was right" if report.verified else "  BYTES WERE WRONG")
    print_timeline(report.timeline)
