"""``kvferry doctor``: the request, the findings, and how a failed check becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvferry.cli.parsing import LONGEST_SENTENCE, one_line
from kvferry.errors import KvferryError

REPORT = "please report it with the output of `kvferry doctor --json`"


class State(StrEnum):
    """Whether a finding prevents what the user asked for."""

    OK = "ok"
    NOTE = "note"  # worth knowing, or a problem for something that was not asked for
    PROBLEM = "problem"  # the request cannot work


class Finding(msgspec.Struct, frozen=True):
    """One result of a check; notes and problems have a remedy."""

    area: str
    name: str
    state: State
    detail: str
    remedy: str = ""


class Area(NamedTuple):
    """A group of findings, by the title it has in the output."""

    title: str

    def ok(self, name: str, detail: str) -> Finding:
        """Return a finding that needs no action."""
        return Finding(self.title, name, State.OK, detail)

    def note(self, name: str, detail: str, remedy: str = "") -> Finding:
        """Return a finding that does not prevent the request."""
        return self.issue(name, detail, remedy, needed=False)

    def problem(self, name: str, detail: str, remedy: str = "") -> Finding:
        """Return a finding that prevents the request."""
        return self.issue(name, detail, remedy, needed=True)

    def issue(self, name: str, detail: str, remedy: str = "", *, needed: bool) -> Finding:
        """Return a problem if the thing is needed, else a note.

        Without ``remedy``, it is the part of ``detail`` after the last semicolon.
        """
        state = State.PROBLEM if needed else State.NOTE
        detail = one_line(detail)
        if not remedy:
            before, _, after = detail.rpartition("; ")
            detail, remedy = (before, after) if before else (detail, REPORT)
        return Finding(self.title, name, state, detail, remedy)


class DoctorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The intended uses of the machine."""

    transport: str = "auto"
    device: str = "cpu"
    discovery: str | None = None
    key_file: str | None = None

    @property
    def on_host(self) -> bool:
        """Whether the pools are in host memory."""
        return self.device == "cpu"

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports that the name stands for, best first."""
        # Probes import this module and must start without what a transport needs.
        from kvferry.transports.transport_set import transport_names  # noqa: PLC0415

        return transport_names(self.transport)

    @property
    def best_transport(self) -> str:
        """The transport that an endpoint chooses if all of them work."""
        return "cuda" if self.transport == "auto" and not self.on_host else self.transports[0]

    def needs(self, transport: str) -> bool:
        """Whether this transport must work; ``auto`` needs no particular one."""
        return self.transport != "auto" and transport in self.transports


Check = Callable[[], Finding | Iterable[Finding]]


def run_check(area: Area, name: str, check: Check) -> list[Finding]:
    """Return a check's findings; an exception becomes a problem."""
    try:
        found = check()
        return [found] if isinstance(found, Finding) else list(found)
    except KvferryError as error:
        return [area.problem(name, str(error))]
    except Exception as error:  # A traceback would hide the other findings.
        detail = f"this check failed ({type(error).__name__}: {error})"[:LONGEST_SENTENCE]
        return [area.problem(name, detail, REPORT)]


def read_kernel_file(path: Path) -> str | None:
    """Return the content of a file of /proc or /sys; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
