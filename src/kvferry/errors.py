"""Every error that kvferry raises on purpose.

    KvferryError
    ├── InputError      a value that no layout or request can have; fix the call
    ├── Refused         a combination that can't work; carries typed reasons
    ├── Misuse          a call that does not fit the room's state; nothing was changed
    ├── TransportError  a transport can't be had, or can't use what it was given
    └── BrokenPlan      a plan failed its own proof; a bug of ours

A ``Reason`` is data: a code for routers and tests, a sentence for people that
ends in what to change. This module knows nothing about what is being refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class ReasonCode(StrEnum):
    """Why two layouts, or one layout and its model, do not fit."""

    NO_UNITS = "no-units"
    NO_LAYERS = "no-layers"
    TP_UNITS = "tp-does-not-fit-units"
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
    UNKNOWN_ARCHITECTURE = "unknown-architecture"
    BAD_CONFIG = "bad-model-config"
    TOO_LARGE = "too-large"


class Reason(msgspec.Struct, frozen=True):
    """One typed reason for a refusal."""

    code: ReasonCode
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class KvferryError(Exception):
    """The root of every error kvferry raises on purpose."""


class InputError(KvferryError, ValueError):
    """A value that cannot be what it is meant to be; the message says the remedy."""


class Refused(KvferryError, ValueError):
    """What was asked can't work; ``reasons`` says why, one typed reason each."""

    def __init__(self, reasons: Iterable[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(str(reason) for reason in self.reasons))

    @classmethod
    def because(cls, code: ReasonCode, message: str) -> Refused:
        """Refuse for a single reason."""
        return cls([Reason(code, message)])


class Misuse(KvferryError):
    """The caller asked for a step that this room's state does not allow."""


class TransportError(KvferryError):
    """A transport is missing, or can't do what was asked; the message says the remedy."""


class BrokenPlan(KvferryError):
    """A plan does not cover its targets exactly once. Please report it as a bug."""
