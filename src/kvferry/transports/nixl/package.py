"""Import of the NIXL package under any of its names, with its logging under control."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from contextlib import suppress
from functools import cache
from typing import Any

# The package that selects a CUDA version itself, and the two that it selects from.
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")


@cache
def load() -> Any:
    """Import NIXL's Python interface. Raises ``ImportError``."""
    # NIXL bundles a libibverbs and later loads the system's too. Unless the system's is bound
    # first, the two get mixed up at the end of the process, which then crashes.
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    raises = logging.raiseExceptions
    try:
        module = _import()
    finally:
        logging.raiseExceptions = raises  # NIXL turns it off for the whole process.
    _redirect_log()
    return module


def missing() -> str | None:
    """Return what to install, in one sentence; None if NIXL can be imported."""
    try:
        load()
    except ModuleNotFoundError:
        return "the nixl transport needs NIXL; pip install 'kvferry[nixl]'"
    except ImportError as error:
        return f"NIXL is installed but cannot be loaded ({error}); reinstall it: pip install nixl"
    return None


def _import() -> Any:
    for name in _MODULES:
        # An installed module that fails to find its own dependencies raises ImportError.
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError("nixl")


def _redirect_log() -> None:
    """Send NIXL's warnings through the logging tree; by default it prints on stdout.

    ``NIXL_LOG_LEVEL`` still sets the level.
    """
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)
