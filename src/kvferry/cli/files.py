"""Files that the user names, and the logs of started processes."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from kvferry.cli.parsing import show_path
from kvferry.errors import InputError


def write_text(name: str, text: str) -> None:
    """Write a file; an ``OSError`` becomes an ``InputError`` with a remedy."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write {show_path(name)}: {error.strerror}; choose another path"
        ) from None


def last_log_line(log: IO[bytes]) -> str:
    """Return the last line of a process's log, to append to an error."""
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").split("\n") if line.strip()]
    return f" (its last line: {lines[-1][:300]})" if lines else ""
