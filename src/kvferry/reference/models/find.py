"""Model folders by name: the default model, a small random one, or a path.

Models that are made here are kept in the user's cache folder. Imports nothing large.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvferry import InputError
from kvferry.reference.cluster.description import ModelFolder

DEFAULT_NAME = "SmolLM2-135M-Instruct"
# The numbers are increased when the conversion changes, so that old folders are not used.
DEFAULT = f"{DEFAULT_NAME}-1"
TINY = {"tiny": "llama", "tiny-qwen3": "qwen3", "tiny-hybrid": "hybrid"}
TINY_VERSION = 1


def cache_folder() -> Path:
    """Return the folder of converted models: in ``XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvferry"


def find_model(name: str) -> ModelFolder:
    """Return a model's folder; make the default model or a small one if it is not there yet."""
    if not name:
        return ModelFolder(default_model(), DEFAULT_NAME)
    if name in TINY:
        return ModelFolder(_tiny(name), name)
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(
            f"there is no model folder {name!r}; give one with --model, or leave it out for "
            f"{DEFAULT_NAME}"
        )
    return ModelFolder(folder.resolve(), folder.resolve().name)


def default_model(cache: Path | None = None) -> Path:
    """Return the folder of the default model; convert it first if necessary (ten seconds)."""

    def convert(folder: Path) -> None:
        # Slow to import, and needed only once.
        from kvferry.reference.models.smollm import convert, package_file  # noqa: PLC0415

        convert(package_file(), folder)

    return _made_once((cache or cache_folder()) / DEFAULT, convert)


def _tiny(name: str) -> Path:
    def make(folder: Path) -> None:
        from kvferry.reference.models.tiny import TinyKind, make_tiny  # noqa: PLC0415

        make_tiny(folder, TinyKind(TINY[name]))

    return _made_once(cache_folder() / f"{name}-{TINY_VERSION}", make)


def _made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder unless it exists; a process that is killed halfway leaves no such folder."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.parent.glob(f"{folder.name}.tmp*"):
                shutil.rmtree(left, ignore_errors=True)
            if not folder.is_dir():
                scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
                try:
                    make(scratch)
                    scratch.chmod(0o755)
                    scratch.rename(folder)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"{folder.parent} can't be written ({error.strerror}); set XDG_CACHE_HOME to a folder "
            f"with 600 MB of room"
        ) from None
    return folder
