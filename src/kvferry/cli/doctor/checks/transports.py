"""Every transport that is installed: its version, and whether it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions, entry_points

from kvferry.cli.doctor.checks.check import Asked, Check, State, lacking, ok
from kvferry.cli.doctor.checks.children import Children, ProbeChild, ProbeFailed
from kvferry.cli.parsing import show
from kvferry.errors import InputError
from kvferry.plan.units import human_seconds
from kvferry.transports.registry import GROUP
from kvferry.transports.transport_set import AUTO

AREA = "transports"
LIMIT_S = 30.0
NO_WIRE = "pip install 'kvferry[nixl]' to reach other hosts"
# Ours use packages of these names, or names that begin with them and a dash.
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine", "cuda": "cuda-bindings"}
# What a transport is tried with, where it can't carry the other.
DEVICES = {"cuda": "cuda", "shm": "cpu"}


def names(asked: Asked) -> list[str]:
    """Every transport, those that were asked for first."""
    known = sorted(entry_points(group=GROUP).names)
    for name in asked.transports:
        if name not in known:
            raise InputError(
                f"there is no transport {show(name)}; choose one of {', '.join(known)}, auto, "
                f"or install the package that adds it"
            )
    return list(dict.fromkeys([*asked.transports, *known]))


def begin(asked: Asked, children: Children) -> dict[str, ProbeChild]:
    """Start every transport in a process of its own."""

    def device(name: str) -> str:
        if asked.needs(name):
            return asked.device
        return DEVICES.get(name, asked.device)

    return {
        name: children.start("transport", name, device(name), limit_s=LIMIT_S)
        for name in names(asked)
    }


def started(asked: Asked, begun: Mapping[str, ProbeChild]) -> Iterator[Check]:
    """How each of them went."""
    checks = [_one(name, child, needed=asked.needs(name)) for name, child in begun.items()]
    if asked.transport == AUTO:
        works = {check.name for check in checks if check.state is State.OK}
        yield judge_auto(asked.on_host, [name for name in asked.transports if name in works])
    yield from checks


def judge_auto(on_host: bool, works: Sequence[str]) -> Check:
    """What ``auto`` would take here, if the other side has it too."""
    mapped = "shm" if on_host else "cuda"
    wires = [name for name in works if name not in ("shm", "cuda")]
    if mapped not in works and not wires:
        text = "no transport works here; see why below, and install one"
        return lacking(AREA, AUTO, text, needed=True)
    near = mapped if mapped in works else wires[0]
    far = wires[0] if wires else f"none: {NO_WIRE}"
    return ok(AREA, AUTO, f"takes {near} to peers that share this host's memory, to others {far}")


def _one(name: str, child: ProbeChild, *, needed: bool) -> Check:
    try:
        found = child.answer()
    except ProbeFailed as error:
        remedy = f"reinstall the package of {name}, or choose another transport"
        return lacking(AREA, name, str(error), needed=needed, remedy=remedy)
    if "problem" in found:
        return lacking(AREA, name, found["problem"], needed=needed)
    return ok(AREA, name, f"{version(name)}; started in {human_seconds(found['seconds'])}")


def version(name: str) -> str:
    """The package that a transport comes from, or the one that it uses."""
    used = PACKAGES.get(name)
    if used is not None:
        # What was half uninstalled has no name.
        installed = {dist.name.lower(): dist.version for dist in distributions() if dist.name}
        for package, number in sorted(installed.items()):
            if package == used or package.startswith(f"{used}-"):
                return f"{package} {number}"
    for entry in entry_points(group=GROUP, name=name):
        if entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
    return "of unknown version"
