"""Checks that the packages of a cluster are installed, before any of its processes starts.

Imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from kvferry.errors import InputError, TransportError
from kvferry.reference.models.find import (
    DEFAULT,
    INSTALL_MODEL,
    MODEL_PACKAGE,
    OTHERWISE,
    cache_folder,
)

# Of the extra ``serve``; ``gguf`` is only for the default model, before it is converted.
MODULES = ("torch", "safetensors", "tokenizers", "jinja2")
CONVERTER = "gguf"
INSTALL = "pip install 'kvferry[serve]'"


def demand_installed(model: str, transport: str) -> None:
    """Refuse a transport or a model whose packages are missing; "" is the default model."""
    demand_transport(transport)
    is_default = not model and not (cache_folder() / DEFAULT).is_dir()
    problem = lacking(lambda module: find_spec(module) is not None, is_default)
    if problem is not None:
        raise InputError(problem)


def demand_transport(name: str) -> None:
    """Refuse a transport that is unknown or lacks something; ``auto`` takes what there is."""
    # Slow to import, and most commands need no transport.
    from kvferry.transports.registry import ready_transports  # noqa: PLC0415

    try:
        ready_transports(name)
    except TransportError as error:
        raise InputError(str(error)) from None


def lacking(is_installed: Callable[[str], bool], is_default: bool) -> str | None:
    """Return what is missing and the command that installs it; None if nothing is.

    ``is_default``: the default model has to be converted.
    """
    modules = (*MODULES, CONVERTER) if is_default else MODULES
    missing = [name for name in modules if not is_installed(name)]
    commands = [INSTALL] if missing else []
    if is_default and not is_installed(MODEL_PACKAGE):
        missing.append("the default model")
        commands.append(INSTALL_MODEL)
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    otherwise = f", {OTHERWISE}" if INSTALL_MODEL in commands else ""
    return f"{', '.join(missing)} {are} not installed; run {' && '.join(commands)}{otherwise}"
