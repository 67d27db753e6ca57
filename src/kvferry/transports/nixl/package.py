"""The NIXL package: found under any of its names, loaded when first needed, and kept quiet."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from contextlib import suppress
from functools import cache
from typing import Any

# The package that chooses by itself, and the two that it chooses from.
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")


@cache
def load() -> Any:
    """NIXL's Python interface. Raises ``ImportError`` if it can't be had."""
    # NIXL brings a libibverbs of its own and later loads the system's too. Unless the
    # system's is bound first, the two mix at the end of the process, which then crashes.
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    raises = logging.raiseExceptions
    try:
        module = _import()
    finally:
        logging.raiseExceptions = raises  # NIXL switches it off for the whole process.
    _hush()
    return module


def missing() -> str | None:
    """What to install, in one sentence; None if NIXL is there."""
    try:
        load()
    except ModuleNotFoundError:
        return "the nixl transport needs NIXL; pip install 'kvferry[nixl]'"
    except ImportError as error:
        return f"NIXL is installed but can't be loaded ({error}); reinstall it: pip install nixl"
    return None


def _import() -> Any:
    for name in _MODULES:
        # A module that is there but lacks something of its own is another matter.
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError("nixl")


def _hush() -> None:
    """Hand NIXL's messages to whoever has set up logging, and only those that matter.

    It prints on stdout, which belongs to the program. ``NIXL_LOG_LEVEL`` still rules.
    """
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)
