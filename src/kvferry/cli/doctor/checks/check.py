"""A finding, what was asked, and a look that always ends in findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvferry.cli.parsing import LONGEST_SENTENCE, one_line
from kvferry.errors import KvferryError
from kvferry.transports.transport_set import AUTO, transport_names

REPORT = "please report it with the output of `kvferry doctor --json`"


class State(StrEnum):
    """Whether a finding stands in the way of what was asked."""

    OK = "ok"
    NOTE = "note"  # worth knowing, or in the way of something else
    PROBLEM = "problem"  # what was asked can't work


class Check(msgspec.Struct, frozen=True):
    """One finding. ``remedy`` says what to do about it, where there is something to do."""

    area: str
    name: str
    state: State
    detail: str
    remedy: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine shall be good for."""

    transport: str = AUTO
    device: str = "cpu"
    discovery: str | None = None
    key_file: str | None = None

    @property
    def on_host(self) -> bool:
        """Whether the pools are in the host's memory."""
        return self.device == "cpu"

    @property
    def transports(self) -> tuple[str, ...]:
        """All that the name means, best first."""
        return transport_names(self.transport)

    @property
    def best(self) -> str:
        """What would be taken if all of them worked."""
        first = self.transports[0]
        return "cuda" if self.transport == AUTO and not self.on_host else first

    def needs(self, transport: str) -> bool:
        """Whether one must work; under ``auto`` none must, so long as another does."""
        return self.transport != AUTO and transport in self.transports


class Look(NamedTuple):
    """One thing to look at."""

    area: str
    name: str
    look: Callable[[], Iterable[Check]]


def ok(area: str, name: str, detail: str) -> Check:
    """Nothing to do."""
    return Check(area, name, State.OK, detail)


def lacking(area: str, name: str, sentence: str, *, needed: bool, remedy: str = "") -> Check:
    """Something is not there or does not work: a problem if it is ``needed``.

    Our sentences end in what to do, behind the last semicolon; ``remedy`` is for
    those that do not.
    """
    state = State.PROBLEM if needed else State.NOTE
    told = one_line(sentence)
    if not remedy:
        what, _, remedy = told.rpartition("; ")
        told, remedy = (what, remedy) if what else (told, REPORT)
    return Check(area, name, state, told, remedy)


def findings(look: Look) -> list[Check]:
    """What a look finds. Whatever goes wrong in it is a finding as well."""
    try:
        return list(look.look())
    except KvferryError as error:
        return [lacking(look.area, look.name, str(error), needed=True)]
    except Exception as error:  # Nobody asks a doctor for a traceback.
        told = f"looking at this failed ({type(error).__name__}: {error})"[:LONGEST_SENTENCE]
        return [lacking(look.area, look.name, told, needed=True, remedy=REPORT)]
