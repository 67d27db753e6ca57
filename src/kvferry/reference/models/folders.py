"""Folders where models are kept, and names of the files in them. Imports nothing large."""

from __future__ import annotations

import os
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The default model's folder. Counted up when its conversion changes, so that nobody goes on with
# an old one.
DEFAULT = "SmolLM2-135M-Instruct-1"


def cache_folder() -> Path:
    """Where converted models are kept: under ``XDG_CACHE_HOME``, else ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvferry"
