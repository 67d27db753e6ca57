"""The conformance suite for transports: what ``transports/base.py`` promises, over real processes.

To test a transport, declare it in the entry-point group ``kvferry.transports`` and subclass the
suite in a test module::

    from kvferry.testing.transports import TransportSuite

    class TestMine(TransportSuite):
        transport = "mine"
        options = {"rail": "3"}             # for the transport's setup
        environment = {"MINE_DEBUG": "1"}   # for its processes
        device = "cuda"                     # if it carries GPU memory

Put marks on the subclass. Override a case that cannot hold for the transport, and state the reason.
Only ``TransportSuite`` needs pytest; importing this package does not.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from kvferry.testing.transports.bindings import PlacedPiece, binding_of, copy_by_memmove, grid

if TYPE_CHECKING:
    from kvferry.testing.transports.suite import TransportSuite

__all__ = ["PlacedPiece", "TransportSuite", "binding_of", "copy_by_memmove", "grid"]

_CASES = [f"{__name__}.{name}" for name in ("base", "writes", "suite")]


def __getattr__(name: str) -> Any:
    """Import the suite on first use."""
    if name != "TransportSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    pytest = importlib.import_module("pytest")
    # With this, failing cases show the values that differ.
    pytest.register_assert_rewrite(*(case for case in _CASES if case not in sys.modules))
    suite = importlib.import_module(f"{__name__}.suite").TransportSuite
    return globals().setdefault(name, suite)
