"""The model that is meant: the default one, a small random one, or a folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kvferry import InputError
from kvferry.reference.cluster.description import ModelFolder
from kvferry.reference.models.folders import DEFAULT, cache_folder

DEFAULT_NAME = "SmolLM2-135M-Instruct"
TINY = {"tiny": "llama", "tiny-qwen3": "qwen3", "tiny-hybrid": "hybrid"}
# Counted up when what ``tiny`` makes changes.
TINY_VERSION = 1


def find_model(name: str) -> ModelFolder:
    """The folder of a model, made first if it is one of ours."""
    if not name:
        return ModelFolder(_default(), DEFAULT_NAME)
    if name in TINY:
        return ModelFolder(_tiny(name), name)
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(
            f"there is no model folder {name!r}; give one with --model, or leave it out for "
            f"{DEFAULT_NAME}"
        )
    return ModelFolder(folder.resolve(), folder.resolve().name)


def _default() -> Path:
    folder = cache_folder() / DEFAULT
    if folder.is_dir():
        return folder
    # Only needed once, and slow to import.
    from kvferry.reference.models.smollm import default_model  # noqa: PLC0415

    return default_model()


def _tiny(name: str) -> Path:
    folder = cache_folder() / f"{name}-{TINY_VERSION}"
    if folder.is_dir():
        return folder
    from kvferry.reference.models.tiny import TinyKind, make_tiny  # noqa: PLC0415

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
        try:
            make_tiny(scratch, TinyKind(TINY[name]))
            scratch.chmod(0o755)
            os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        # Somebody else has made the same meanwhile, which is as good.
        if not folder.is_dir():
            raise InputError(
                f"{folder.parent} can't be written ({error.strerror}); set XDG_CACHE_HOME"
            ) from None
    return folder
