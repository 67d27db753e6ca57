"""``kvferry bench transfer``: one request's cache, real processes, verified bytes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvferry.cli.parsing import whole
from kvferry.cli.printing import EXIT_REFUSED, print_document, print_refusal
from kvferry.cli.sides import Sides, both_sides, read_side, read_spec
from kvferry.endpoint.config import EndpointConfig
from kvferry.errors import InputError, Refused
from kvferry.plan import PRESETS, Plan, Request, TransferMode, check, estimate, reshard
from kvferry.plan.units import MIB, human_bytes, human_seconds
from kvferry.protocol.outcome import Status
from kvferry.reference.cluster.needs import demand_transport
from kvferry.regions import Device
from kvferry.testing.fleet import Fleet, FleetSide, RankProcess

TIMEOUT_S = 120.0
READY_S = 30.0
# By then every source has been told to push.
START_S = 5e-3


class TransferReport(msgspec.Struct, kw_only=True):
    """What was measured."""

    transport: str
    chosen: str
    prefill: str
    decode: str
    device: str
    tokens: int
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


class TransferJob(NamedTuple):
    """What is to be measured."""

    plan: Plan
    request: Request
    transport: str
    device: str
    chunk: int
    repeat: int
    config: EndpointConfig


def run(args: argparse.Namespace) -> int:
    """Read, measure, print."""
    job = _read(args)
    if isinstance(job, int):
        return job
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
    # Says early, and in one sentence, where a mode is not open.
    estimate(plan, request, PRESETS["nixl-host"], override=mode)
    sizes = {
        name: whole(flag)(text) * MIB
        for name, flag, text in (
            ("staging_bytes", "--staging-mib", args.staging_mib),
            ("slot_bytes", "--slot-mib", args.slot_mib),
        )
        if text
    }
    config = msgspec.structs.replace(EndpointConfig(mode=mode, deadline_s=TIMEOUT_S), **sizes)
    chunk = whole("--chunk")(args.chunk) if args.chunk else request.num_tokens
    repeat = whole("--repeat")(args.repeat)
    return TransferJob(plan, request, args.transport, args.device, chunk, repeat, config)


# ---------------------------------------------------------------- measuring


def measure(job: TransferJob, *, show: bool) -> TransferReport:
    """Start a process per rank and carry the request again and again."""
    tokens = job.request.num_tokens
    sides = [
        FleetSide(name, layout, 2 * (-(-tokens // layout.page_tokens)), job.config)
        for name, layout in (("prefill", job.plan.source), ("decode", job.plan.target))
    ]
    with Progress(transient=True, disable=not show, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting a process per rank", total=job.repeat + 3)
        with Fleet(*sides, transport=job.transport, device=job.device) as fleet:
            course = _TransferProgress(
                job, fleet, lambda text: progress.update(task, description=text)
            )
            progress.advance(task)
            first_s, good = course.carry(0, verify=True)
            progress.advance(task)
            before = course.carried()
            ceiling = _ceiling(job, fleet)
            all_s, copies_s = [], []
            for number in range(1, job.repeat + 1):
                copies_s.append(ceiling())
                seconds, right = course.carry(number, verify=number == job.repeat)
                all_s.append(seconds)
                good = good and right
                progress.advance(task)
            return _report(
                job, fleet, course.carried().minus(before), first_s, all_s, copies_s, good
            )


def _ceiling(job: TransferJob, fleet: Fleet) -> Callable[[], float]:
    """Seconds of a plain copy of as many bytes where the pools are, in memory that is warm."""
    num_bytes = job.plan.payload_bytes(job.request)
    if not Device.parse(job.device).is_host:
        return lambda: float(fleet.targets["decode"][0].ask("plain_copy_s", num_bytes))
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)

    def seconds() -> float:
        begin = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begin

    return seconds


class CarriedBytes(NamedTuple):
    """What the sources have written, by mode."""

    pieces: dict[TransferMode, int]
    num_bytes: dict[TransferMode, int]

    def minus(self, other: CarriedBytes) -> CarriedBytes:
        """What was written since."""
        return CarriedBytes(
            {mode: self.pieces[mode] - other.pieces[mode] for mode in TransferMode},
            {mode: self.num_bytes[mode] - other.num_bytes[mode] for mode in TransferMode},
        )

    @property
    def mode(self) -> TransferMode:
        """The mode that carried the most."""
        return max(TransferMode, key=lambda mode: self.num_bytes[mode])


class _TransferProgress:
    """The same request, carried repeatedly."""

    def __init__(self, job: TransferJob, fleet: Fleet, tell: Callable[[str], None]) -> None:
        self._job = job
        self._fleet = fleet
        self._targets = fleet.targets["decode"]
        self._tell = tell

    def carry(self, number: int, *, verify: bool) -> tuple[float, bool]:
        """Seconds from the push, which all sources make together, to the last target's end.

        And whether every byte was right.
        """
        job, fleet, room = self._job, self._fleet, f"bench-{number}"
        tokens = job.request.num_tokens
        self._tell(f"repetition {number} of {job.repeat}" if number else "first transfer")
        if verify:
            fleet.all(self._targets, "clear")
            fleet.fill(room, number, tokens)
        else:
            fleet.place(room, tokens)
        fleet.receive(room, "decode", job.request, TIMEOUT_S)
        fleet.all(fleet.sources, "open", room, TIMEOUT_S)
        if number:
            _until_offered(room, fleet.sources)
            # As engines do when they begin to compute a chunk.
            fleet.all(fleet.sources, "prepare", room, (0, min(job.chunk, tokens)))
        how = job.chunk, b"first token", None, time.monotonic() + START_S
        began = min(fleet.all(fleet.sources, "push_all", room, tokens, *how))
        fleet.demand_done(room, [*self._targets, *fleet.sources], TIMEOUT_S)
        ended = max(fleet.all(self._targets, "ended", room))
        good = True
        if verify:
            self._tell("comparing every byte")
            problems = fleet.all(self._targets, "problem", room, number, job.request)
            good = not any(problems)
        fleet.all([*self._targets, *fleet.sources], "wait_released", room, TIMEOUT_S)
        fleet.forget(room, "decode")
        return ended - began, good

    def carried(self) -> CarriedBytes:
        """What all sources have written so far."""
        stats = self._fleet.all(self._fleet.sources, "stats")
        return CarriedBytes(
            {mode: sum(one.modes[mode].pieces for one in stats) for mode in TransferMode},
            {mode: sum(one.modes[mode].num_bytes for one in stats) for mode in TransferMode},
        )


def _until_offered(room: str, sources: list[RankProcess]) -> None:
    """In a running system the offer comes while prefill computes; so here it comes first."""
    give_up = time.monotonic() + READY_S
    while any(source.ask("status", room) == Status.CONNECTING for source in sources):
        if time.monotonic() > give_up:
            raise InputError(
                f"the targets made no offer within {READY_S:g} s; is the machine busy?"
            )
        time.sleep(0.002)


def _report(
    job: TransferJob,
    fleet: Fleet,
    carried: CarriedBytes,
    first_s: float,
    all_s: list[float],
    copies_s: list[float],
    verified: bool,
) -> TransferReport:
    num_bytes = job.plan.payload_bytes(job.request)
    links: list[dict[str, str]] = fleet.all(fleet.sources, "links")
    median, memcpy_s = statistics.median(all_s), statistics.median(copies_s)
    return TransferReport(
        transport=job.transport,
        chosen="+".join(sorted({name for one in links for name in one.values()})),
        prefill=str(job.plan.source),
        decode=str(job.plan.target),
        device=job.device,
        tokens=job.request.num_tokens,
        mode=str(carried.mode),
        bytes=num_bytes,
        seconds={"median": median, "all": all_s},
        first_seconds=first_s,
        gb_per_s=num_bytes / median / 1e9,
        memcpy_seconds=memcpy_s,
        memcpy_ratio=median / memcpy_s,
        pieces=sum(carried.pieces.values()) // job.repeat,
        staging_bytes=max(fleet.all(fleet.ranks, "staging_bytes")),
        verified=verified,
    )


def _print(report: TransferReport) -> None:
    all_s = report.seconds["all"]
    spread = f"{human_seconds(min(all_s))} to {human_seconds(max(all_s))}"
    print(f"{report.prefill}  →  {report.decode}, {report.tokens} tokens over {report.chosen}")
    print(f"  {human_bytes(report.bytes)} by {report.mode} in {report.pieces:,} pieces")
    print(f"  {human_seconds(report.seconds['median'])} ({spread}), {report.gb_per_s:.2f} GB/s")
    print(f"  first transfer {human_seconds(report.first_seconds)}")
    print(
        f"  a plain copy of as much takes {human_seconds(report.memcpy_seconds)}: "
        f"{report.memcpy_ratio:.2f} times that"
    )
    print(f"  staging {human_bytes(report.staging_bytes)} for each endpoint at most")
    print("  every byte was right" if report.verified else "  BYTES WERE WRONG")
