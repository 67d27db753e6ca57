"""Reading and writing the user's files, with errors a person can act on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvferry.errors import InputError

# A model's config.json has a few kilobytes. What is larger is something else.
MAX_CONFIG_BYTES = 8 << 20


def read_config(name: str) -> dict[str, object]:
    """A Hugging Face ``config.json``, given as the file or as the folder it lies in."""
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path} is too large for a model's config.json; check the path")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not a JSON object ({error}); give a config.json") from None


def write_text(name: str, text: str) -> None:
    """Write a file that the user asked for."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {name}: {error.strerror}; choose another path") from None
