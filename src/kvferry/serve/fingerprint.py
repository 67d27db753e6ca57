"""What tells one checkpoint from another, quickly: not every byte of it is read."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from kvferry.errors import InputError

# A safetensors file begins with the names and shapes of everything in it, and ends in weights.
SAMPLE_BYTES = 1 << 16


def fingerprint(folder: Path) -> str:
    """Equal for equal models; the configuration and a sample of every weight file decide."""
    try:
        digest = blake2b((folder / "config.json").read_bytes(), digest_size=12)
    except OSError as error:
        raise InputError(
            f"{folder} has no config.json that can be read ({error.strerror}); "
            f"give the folder of a whole model"
        ) from None
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
