"""Reading and writing the user's files, with errors a person can act on."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec

from kvferry.cli.parsing import show_path
from kvferry.errors import InputError

# A model's config.json has a few kilobytes. What is larger is something else.
MAX_CONFIG_BYTES = 8 << 20


def read_config(name: str) -> dict[str, object]:
    """A Hugging Face ``config.json``, given as the file or as the folder it lies in."""
    path = Path(name)
    where = show_path(path)
    try:
        if path.is_dir():
            path /= "config.json"
            where = show_path(path)
        return msgspec.json.decode(_read_bounded(path), type=dict[str, object])
    except OSError as error:
        raise InputError(f"cannot read {where}: {error.strerror}; check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not a JSON object ({error}); give a config.json") from None


def _read_bounded(path: Path) -> bytes:
    # Asked before opening: opening a pipe waits for a writer, and a device may never end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{show_path(path)} is not a file; give a model's config.json")
    with path.open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise InputError(
            f"{show_path(path)} is too large for a model's config.json; check the path"
        )
    return content


def write_text(name: str, text: str) -> None:
    """Write a file that the user asked for."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write {show_path(name)}: {error.strerror}; choose another path"
        ) from None
