"""Every transport that is installed: its version, and whether it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import distributions, entry_points

from kvferry.cli.doctor.checks.check import Asked, Check, lacking, ok
from kvferry.cli.doctor.checks.children import Child, Children, ProbeFailed
from kvferry.cli.parsing import show
from kvferry.errors import InputError
from kvferry.transport.registry import GROUP
from kvferry.units import human_seconds

AREA = "transports"
LIMIT_S = 30.0
# Ours use packages of these names, or names that begin with them and a dash.
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine", "cuda": "cuda-bindings"}
# What a transport is tried with, where it can't carry the host's memory.
DEVICES = {"cuda": "cuda"}


def names(asked: Asked) -> list[str]:
    """Every transport, the one that was asked for first."""
    known = sorted(entry_points(group=GROUP).names)
    if asked.transport not in known:
        raise InputError(
            f"there is no transport {show(asked.transport)}; choose one of {', '.join(known)}, "
            f"or install the package that adds it"
        )
    return [asked.transport, *(name for name in known if name != asked.transport)]


def begin(asked: Asked, children: Children) -> dict[str, Child]:
    """Start every transport in a process of its own."""

    def device(name: str) -> str:
        return asked.device if name == asked.transport else DEVICES.get(name, "cpu")

    return {
        name: children.start("transport", name, device(name), limit_s=LIMIT_S)
        for name in names(asked)
    }


def started(asked: Asked, begun: Mapping[str, Child]) -> Iterator[Check]:
    """How each of them went."""
    for name, child in begun.items():
        yield _one(name, child, needed=name == asked.transport)


def _one(name: str, child: Child, *, needed: bool) -> Check:
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
