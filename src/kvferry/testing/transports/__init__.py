"""The conformance suite for transports: what ``transports/base.py`` promises, over real processes.

Whoever writes a transport declares it in the entry-point group ``kvferry.transports``
and subclasses the suite in a test module::

    from kvferry.testing.transports import TransportSuite

    class TestMine(TransportSuite):
        transport = "mine"
        options = {"rail": "3"}          # for the transport's Setup
        environment = {"MINE_DEBUG": "1"}   # for its processes
        device = "cuda"                     # if it carries GPU memory

Marks go on the subclass; a case that can't hold for a transport is overridden there,
with the reason. Importing this package needs no pytest; ``TransportSuite`` does.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from kvferry.testing.transports.bindings import PlacedPiece, binding_of, copy_by_memmove, grid

if TYPE_CHECKING:
    from kvferry.testing.transports.suite import TransportSuite

__all__ = ["PlacedPiece", "TransportSuite", "binding_of", "copy_by_memmove", "grid"]

_MODULES = ("moving", "refusing", "failing", "living", "at_once", "crew")
_CASES = [f"{__name__}.{name}" for name in _MODULES]


def __getattr__(name: str) -> Any:
    """Import the suite when it is first asked for."""
    if name != "TransportSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    pytest = importlib.import_module("pytest")
    # Failing cases then show the values that differ.
    pytest.register_assert_rewrite(*(case for case in _CASES if case not in sys.modules))
    suite = importlib.import_module(f"{__name__}.suite").TransportSuite
    return globals().setdefault(name, suite)
