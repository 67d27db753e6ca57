"""The whole conformance suite in one class. Needs pytest."""

from __future__ import annotations

from kvferry.testing.transports.at_once import AtOnceCases
from kvferry.testing.transports.failing import FailingCases
from kvferry.testing.transports.living import LivingCases
from kvferry.testing.transports.moving import MovingCases
from kvferry.testing.transports.refusing import RefusingCases


class TransportSuite(MovingCases, RefusingCases, FailingCases, LivingCases, AtOnceCases):
    """What every transport must do, over real processes."""
