"""Files: those that the user asks for, and logs of our own, with errors a person can act on."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from kvferry.cli.parsing import show_path
from kvferry.errors import InputError


def write_text(name: str, text: str) -> None:
    """Write a file that the user asked for."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write {show_path(name)}: {error.strerror}; choose another path"
        ) from None


def last_words(log: IO[bytes]) -> str:
    """The last line that a part has logged, which often says more than the error."""
    log.seek(0)
    said = [line for line in log.read().decode(errors="replace").split("\n") if line.strip()]
    return f" (its last line: {said[-1][:300]})" if said else ""
