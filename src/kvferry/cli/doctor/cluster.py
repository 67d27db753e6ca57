"""Checks of the control channel, the cluster key, the discovery service, and two layouts."""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import http.client
import secrets
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from kvferry.cli.doctor import Area, DoctorRequest, Finding
from kvferry.cli.parsing import whole
from kvferry.cli.sides import Sides, both_sides, read_side, read_spec
from kvferry.discovery.address import ETCD, STATIC
from kvferry.discovery.client import discovery_at
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.discovery.status_page import find_status_url, web_record
from kvferry.endpoint.control.sockets import ControlClient, ControlServer
from kvferry.errors import InputError, Reason, Refused
from kvferry.memory.staging import slots_for
from kvferry.plan import Estimate, Plan, Request, TransferMode, check, estimate, reshard
from kvferry.plan.cost import default_link_cost, preset_for, slots_on
from kvferry.plan.units import human_bytes, human_seconds
from kvferry.regions import HOST, Device
from kvferry.security.keys import KEY_FILE_VARIABLE, ClusterKey
from kvferry.security.signing import TOLERANCE_S

CONTROL, LAYOUTS = Area("control"), Area("layouts")
REPLY_LIMIT_S = 3.0
# How long the probe stays in etcd if it cannot be withdrawn.
PROBE_LEASE_S = 10.0
# Far below the tolerance of signatures, and above what a synchronised clock differs by.
ODD_CLOCK_S = 30.0


# ---------------------------------------------------------------- control channel


def check_channel(request: DoctorRequest) -> list[Finding]:
    """Check ZeroMQ's version and encryption, and send a frame over loopback and back."""
    versions = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        encryption = CONTROL.ok("zeromq", f"{versions}, with CURVE")
        return [encryption, _round_trip(ClusterKey.new())]
    detail = f"{versions}, without CURVE: no cluster key can be used, so only loopback works"
    remedy = "pip install --force-reinstall --only-binary :all: pyzmq"
    needed = request.key_file is not None
    return [CONTROL.issue("zeromq", detail, remedy, needed=needed), _round_trip(None)]


def _round_trip(key: ClusterKey | None) -> Finding:
    server = ControlServer("127.0.0.1", 0, key)
    client = ControlClient(server.address, key)
    begin = time.monotonic()
    try:
        client.send(b"ping")
        while time.monotonic() - begin < REPLY_LIMIT_S:
            for route, frame in server.receive():
                server.send(route, frame)
            if client.receive():
                took = human_seconds(time.monotonic() - begin)
                return CONTROL.ok("loopback", f"connected, and a frame came back, in {took}")
            zmq.select([*server.sockets, *client.sockets], [], [], 0.05)
    finally:
        client.close(0)
        server.close(0)
    detail = f"a frame over 127.0.0.1 did not come back within {REPLY_LIMIT_S:g} s"
    remedy = "check that a firewall or sandbox lets this user connect to 127.0.0.1"
    return CONTROL.problem("loopback", detail, remedy)


# ---------------------------------------------------------------- key and discovery


def check_cluster(request: DoctorRequest) -> Iterator[Finding]:
    """Check that the key can be read, and the discovery service reached with it."""
    try:
        path = request.key_file
        key = ClusterKey.read(path) if path else ClusterKey.from_environment()
    except InputError as error:
        yield CONTROL.problem("cluster key", str(error))
        if request.discovery is not None:
            yield CONTROL.note("discovery", "not tried", "correct the key first")
        return
    if key is None:
        detail = f"none given (--key, {KEY_FILE_VARIABLE}), so endpoints listen on loopback only"
    else:
        detail = f"{key.name}; every party must have the same"
    yield CONTROL.ok("cluster key", detail)
    if request.discovery is not None:
        yield from check_discovery(request.discovery, key)


def check_discovery(url: str, key: ClusterKey | None) -> Iterator[Finding]:
    """Check that the service answers, accepts the key, and has the same time."""
    begin = time.monotonic()
    try:
        asyncio.run(_ask_discovery(url, key))
    except DiscoveryError as error:
        # The sentence of an unreachable service has no remedy of its own.
        has_remedy = "; " in str(error) and error.fault is not DiscoveryFault.UNREACHABLE
        remedy = (
            "check its members with `etcdctl endpoint health`"
            if url.startswith(ETCD)
            else f"start it with `kvferry serve discovery`, or check that it listens on {url}"
        )
        yield CONTROL.problem("discovery", str(error), "" if has_remedy else remedy)
        return
    except InputError as error:
        yield CONTROL.problem("discovery", str(error))
        return
    took = human_seconds(time.monotonic() - begin)
    if url.startswith(ETCD):
        yield CONTROL.ok("discovery", f"etcd takes and removes a registration in {took}")
        yield from _check_status_service(url, key)
        return
    accepted = " and takes the key" if key else ""
    yield CONTROL.ok("discovery", f"{url} answers in {took}{accepted}")
    if url.startswith(STATIC):
        return
    difference_s = _clock_difference_s(url)
    if difference_s is not None:
        yield judge_clock_difference(difference_s)


async def _ask_discovery(url: str, key: ClusterKey | None) -> None:
    """Ask for an instance that does not exist; "incomplete" is the right answer.

    In etcd, where users may have few rights, also register and withdraw it.
    """
    discovery = discovery_at(url, key)
    probe = web_record(f"doctor-{secrets.token_hex(8)}@kvferry", "", 0)
    try:
        async with asyncio.timeout(REPLY_LIMIT_S):
            if url.startswith(ETCD):
                await discovery.register(probe, PROBE_LEASE_S)
                await discovery.withdraw(probe)
            await discovery.watch(probe.instance, "", 0.0)
    except TimeoutError:
        raise DiscoveryError(
            DiscoveryFault.SLOW, f"{url} does not answer within {REPLY_LIMIT_S:g} s"
        ) from None
    except DiscoveryError as error:
        if error.fault is not DiscoveryFault.INCOMPLETE:
            raise
    finally:
        await discovery.close()


def _check_status_service(url: str, key: ClusterKey | None) -> Iterator[Finding]:
    """Note it if nobody shows the status of this cluster."""

    async def find() -> str:
        discovery = discovery_at(url, key)
        try:
            return await find_status_url(discovery)
        finally:
            await discovery.close()

    try:
        yield CONTROL.ok("status page", asyncio.run(find()))
    except DiscoveryError as error:
        detail, _, remedy = str(error).partition("; ")
        yield CONTROL.note("status page", detail, remedy)


def _clock_difference_s(url: str) -> float | None:
    """Return this clock minus the service's; None if the service does not send its time."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/healthz", timeout=REPLY_LIMIT_S) as reply:
            date = email.utils.parsedate_to_datetime(reply.headers["Date"])
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return None
    return time.time() - date.timestamp()


def judge_clock_difference(difference_s: float) -> Finding:
    """Judge the difference; signed requests are valid for a few minutes only."""
    seconds = abs(difference_s)
    if seconds < ODD_CLOCK_S:
        # The service truncates its time to seconds.
        detail = f"{max(0.0, seconds - 1):.0f} s from the discovery service's"
        return CONTROL.ok("clocks", detail)
    side = "ahead of" if difference_s > 0 else "behind"
    detail = f"this clock is {seconds:.0f} s {side} the discovery service's"
    remedy = f"set both clocks: with a key, requests are refused from {TOLERANCE_S} s on"
    return CONTROL.note("clocks", detail, remedy)


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Pairing:
    """Two layouts that fit, and what a request between them costs."""

    plan: Plan
    request: Request
    costs: Estimate
    preset: str
    device: Device

    @property
    def num_peers(self) -> int:
        """The largest number of peers of any rank, over all replicas."""
        plan = self.plan
        of_targets = max(len(plan.contacts(rank)) for rank in range(plan.target.num_ranks))
        of_sources = max(len(plan.audience(rank)) for rank in range(plan.source.num_ranks))
        return max(of_targets * plan.source.dp, of_sources * plan.target.dp)


def read_pairing(
    args: argparse.Namespace, request: DoctorRequest
) -> Pairing | tuple[Reason, ...] | None:
    """Return the given layouts, the reasons why they do not fit, or None without layouts."""
    if args.prefill is None and args.decode is None:
        return None
    if args.prefill is None or args.decode is None:
        missing = "--prefill" if args.prefill is None else "--decode"
        raise InputError(f"{missing} is missing; give both sides, or neither")
    prefill = read_side(args.prefill, "--prefill")
    decode = read_side(args.decode, "--decode", extra={"prefix": whole("prefix", least=0)})
    prompt = Request(whole("--tokens", least=0)(args.tokens), decode.prefix)
    sides = both_sides(lambda side: read_spec(args, side.dtype), prefill, decode)
    if not isinstance(sides, Sides):
        return sides
    try:
        plan = reshard(*sides)
    except Refused as refused:
        return refused.reasons
    check(plan)
    device = HOST if request.on_host else Device("cuda")
    costs = estimate(plan, prompt, default_link_cost(request.best_transport, device))
    return Pairing(plan, prompt, costs, preset_for(request.best_transport, device), device)


def check_layouts(pairing: Pairing | tuple[Reason, ...] | None) -> Iterator[Finding]:
    """Report the reasons of a refusal, or the plan, its transfer mode and its staging."""
    if pairing is None:
        return
    if isinstance(pairing, tuple):
        for reason in pairing:
            has_remedy = "; " in reason.message
            remedy = "" if has_remedy else "change one side's layout"
            yield LAYOUTS.problem(reason.code, reason.message, remedy)
        return
    plan, costs = pairing.plan, pairing.costs
    yield LAYOUTS.ok(
        "plan",
        f"{plan.source} → {plan.target}: {len(plan.moves)} moves, proven; "
        f"{human_bytes(costs.num_bytes)} for {pairing.request.num_tokens} tokens",
    )
    if costs.moves:
        yield _transfer_mode(pairing)
        yield judge_staging(pairing)


def _transfer_mode(pairing: Pairing) -> Finding:
    costs = pairing.costs
    others = ", ".join(
        f"{mode} {human_seconds(costs.predicted_s(mode))}"
        for mode in TransferMode
        if mode is not costs.chosen and costs.is_open(mode)
    )
    detail = (
        f"{costs.chosen}: about {human_seconds(costs.predicted_s())} in "
        f"{costs.pieces(costs.chosen):,} pieces, by the cost model {pairing.preset}"
    )
    return LAYOUTS.ok("mode", f"{detail} ({others})" if others else detail)


def judge_staging(pairing: Pairing, budget_bytes: int | None = None) -> Finding:
    """Judge whether staging memory of this size is used, and whether it suffices."""
    costs, rule = pairing.costs, slots_on(pairing.device)
    shown = human_bytes(rule.budget_bytes if budget_bytes is None else budget_bytes)
    if costs.link_cost.maps_peer:
        return LAYOUTS.ok("staging", "none: this transport copies straight into place")
    staged_bytes = costs.carried(TransferMode.STAGED)
    if not staged_bytes:
        detail = f"not used here; staging_bytes=0 saves {shown} for each endpoint"
        return LAYOUTS.ok("staging", detail)
    spec = pairing.plan.spec
    # A block is never cut below one token, or one state row, of one layer.
    largest_bytes = max(
        len(one.move.units) * spec.group(one.move.group).unit_bytes
        for one in costs.moves
        if one.choice.mode is TransferMode.STAGED
    )
    try:
        slots = slots_for(largest_bytes, budget_bytes=budget_bytes, rule=rule)
    except InputError as error:
        what, _, remedy = str(error).rpartition("; ")
        return LAYOUTS.note("staging", f"{what}, so slices are written", remedy)
    if slots.num_slots < rule.enough:
        detail = f"{shown} are only {slots.num_slots} slots, so copies and writes can't overlap"
        remedy = f"set staging_bytes to {rule.enough * slots.slot_bytes} or more"
        return LAYOUTS.note("staging", detail, remedy)
    gain = costs.predicted_s(TransferMode.SLICES) / costs.predicted_s()
    return LAYOUTS.ok(
        "staging",
        f"{shown} for each endpoint are {slots.num_slots} slots of {human_bytes(slots.slot_bytes)}"
        f"; they carry {human_bytes(staged_bytes)}, {gain:.1f} times as fast as slices",
    )
