"""A checkpoint's fingerprint, taken quickly: not every byte of it is read."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from kvferry import config_bytes

# A safetensors file begins with the names and shapes of everything in it, and ends in weights.
SAMPLE_BYTES = 1 << 16


def fingerprint(folder: Path) -> str:
    """Equal for equal models; the configuration and a sample of every weight file decide."""
    digest = blake2b(config_bytes(folder), digest_size=12)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
