"""Figures of an instance's ranks for Prometheus: each process has its own, a worker shows all.

A rank leaves them in a file where the ranks meet. Whoever reads it waits for nobody, and a rank
that is stopped keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import REGISTRY, generate_latest

# What else a rank's process counts has no label that tells it from the others'.
OURS = "kvferry_"
# Making them takes some milliseconds, and Prometheus asks every few seconds.
EVERY_S = 2.0


class FiguresWriter:
    """A thread of a rank, from its making to ``close``."""

    def __init__(self, folder: Path, rank: int, every_s: float = EVERY_S) -> None:
        self._file = _file_of(folder, rank)
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-figures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is written after this."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        # The folder may be gone, with the instance.
        with contextlib.suppress(OSError):
            while True:
                draft = self._file.with_suffix(".draft")
                draft.write_bytes(own_figures())
                # All or nothing: somebody may read it now.
                draft.replace(self._file)
                if self._over.wait(self._every_s):
                    return


def left_figures(folder: Path, ranks: Iterable[int]) -> list[str]:
    """What those ranks have left; nothing of one that has not come so far."""
    files = (_file_of(folder, rank) for rank in ranks)
    return [file.read_text() for file in files if file.exists()]


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"figures-{rank}.txt"


def own_figures() -> bytes:
    """What the endpoint of this process counts."""
    text = generate_latest(REGISTRY).decode()
    blocks = (block for name, block in _blocks(text) if name.startswith(OURS))
    return "".join(blocks).encode()


def together(first: str, others: Iterable[str]) -> str:
    """One text: the samples of a metric must stand together, below one description."""
    blocks = dict(_blocks(first))
    for text in others:
        for name, block in _blocks(text):
            blocks[name] = blocks[name] + _samples(block) if name in blocks else block
    return "".join(blocks.values())


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each metric's name and its part of a text, which begins with its description."""
    for part in ("\n" + text).split("\n# HELP ")[1:]:
        yield part.split(" ", 1)[0], f"# HELP {part.rstrip()}\n"


def _samples(block: str) -> str:
    return "".join(line for line in block.splitlines(keepends=True) if not line.startswith("#"))
