"""A model's ``config.json``, read with suspicion: a file, of a size that makes sense, of JSON.

Knows nothing of what is in it; ``kvferry.layout.hf`` does, and so does each engine. Beside it, the
fingerprint by which two engines know that they serve the same checkpoint.
"""

from __future__ import annotations

import stat
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.errors import InputError

# A model's config.json has a few kilobytes. What is larger is something else.
MAX_CONFIG_BYTES = 8 << 20
NAME = "config.json"
# A safetensors file begins with the names and shapes of everything in it, and ends in weights.
SAMPLE_BYTES = 1 << 16

T = TypeVar("T")


def read_config(where: str | Path) -> dict[str, object]:
    """A Hugging Face configuration, given as the file or as the folder it lies in."""
    return config_as(where, dict[str, object])


def config_as(where: str | Path, kind: type[T]) -> T:
    """The same, checked to be of that type."""
    try:
        return msgspec.json.decode(config_bytes(where), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{_shown(where)} can't be used ({error}); give a model's {NAME} or its folder"
        ) from None


def config_bytes(where: str | Path) -> bytes:
    """The same, as it lies there."""
    path = Path(where)
    try:
        if path.is_dir():
            path /= NAME
            if not path.exists():
                raise InputError(
                    f"{_shown(where)} has no {NAME}; give the folder of a Hugging Face model"
                )
        return _read_bounded(path)
    except OSError as error:
        raise InputError(f"cannot read {_shown(path)}: {error.strerror}; check the path") from None


def checkpoint_fingerprint(folder: str | Path) -> str:
    """Equal for equal models; the configuration and a sample of every weight file decide.

    Taken quickly: not every byte of them is read.
    """
    digest = blake2b(config_bytes(folder), digest_size=12)
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read_bounded(path: Path) -> bytes:
    # Asked before opening: opening a pipe waits for a writer, and a device may never end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{_shown(path)} is not a file; give a model's {NAME}")
    with path.open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise InputError(f"{_shown(path)} is too large for a model's {NAME}; check the path")
    return content


def _shown(path: str | Path) -> str:
    return f"{str(path)!r:.400}"
