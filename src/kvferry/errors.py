"""Every error that kvferry raises on purpose.

    KvferryError
    ├── InputError      an invalid argument; fix the call
    ├── Refused         an unsupported combination; carries typed reasons
    ├── Misuse          a call that is illegal in the room's state; nothing has changed
    ├── TransportError  a transport is unavailable or was given memory it can't use
    └── BrokenPlan      a plan failed its own check; a bug in kvferry

A ``Reason`` has a code for routers and tests, and a message for people that says what to change.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class ReasonCode(StrEnum):
    """Why a layout does not fit its model, or two layouts do not fit each other."""

    NO_UNITS = "no-units"
    NO_LAYERS = "no-layers"
    TP_UNITS = "tp-does-not-fit-units"
    INTERLEAVE = "interleave-cuts-entries"
    PP_LAYERS = "pp-above-layers"
    STAGES = "stages-do-not-add-up"
    INCOMPLETE = "ownership-incomplete"
    OVERLAP = "ownership-overlaps"
    OUTSIDE = "ownership-outside-model"
    NOT_PRODUCT = "ownership-not-a-product"
    GROUPS = "groups-differ"
    KIND = "kind-differs"
    WINDOW = "window-differs"
    LAYERS = "layers-differ"
    UNITS = "units-differ"
    TENSORS = "tensors-differ"
    DTYPE = "dtype-differs"
    HEAD_DIM = "head-dim-differs"
    ENTRY = "entry-differs"
    UNKNOWN_ARCHITECTURE = "unknown-architecture"
    BAD_CONFIG = "bad-model-config"
    TOO_LARGE = "too-large"


class Reason(msgspec.Struct, frozen=True):
    """A typed reason for a refusal."""

    code: ReasonCode
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class KvferryError(Exception):
    """Base class of every error that kvferry raises on purpose."""


class InputError(KvferryError, ValueError):
    """An invalid value. The message says how to fix it."""


class Refused(KvferryError, ValueError):
    """An unsupported combination. ``reasons`` lists each cause."""

    def __init__(self, reasons: Iterable[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(str(reason) for reason in self.reasons))

    @classmethod
    def because(cls, code: ReasonCode, message: str) -> Refused:
        """Return an error with a single reason."""
        return cls([Reason(code, message)])


class Misuse(KvferryError):
    """A call that the room's state does not allow. Nothing has changed."""


class TransportError(KvferryError):
    """A transport is missing or can't do the operation. The message says how to fix it."""


class BrokenPlan(KvferryError):
    """A plan does not cover its targets exactly once. This is a bug: please report it."""
