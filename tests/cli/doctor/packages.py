"""Python packages that add transports, for tests of ``kvferry doctor``."""

from __future__ import annotations

from pathlib import Path


class Packages:
    """Packages that add transports, on an import path of their own."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._folder = folder

    def add(self, name: str, code: str) -> None:
        info = self._folder / f"{name}_ferry-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-ferry\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(
            f"[kvferry.transports]\n{name} = {name}_ferry:Mine\n"
        )
        head = "from kvferry.transports.shm import ShmTransport\n"
        (self._folder / f"{name}_ferry.py").write_text(head + code)
