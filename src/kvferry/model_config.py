"""A model's ``config.json``, read with suspicion: a file, of a size that makes sense, of JSON.

Knows nothing of what is in it; ``kvferry.layout.hf`` does, and so does each engine. Beside it, the
fingerprint by which two engines know that they serve the same model: one function for every engine
that lives here, so that no two of them mean different things by it.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.errors import InputError
from kvferry.fingerprint import ROPE_FIELDS, ModelFingerprint, named, rope_form, shortened

# A model's config.json has a few kilobytes. What is larger is something else.
MAX_CONFIG_BYTES = 8 << 20
NAME = "config.json"
# A safetensors file begins with the names and shapes of everything in it, and ends in weights.
SAMPLE_BYTES = 1 << 16
# The files that say which words have which ids, under all names that they go by.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
)
_NONE: Mapping[str, object] = {}

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


def tokenizer_fingerprint(folder: str | Path) -> str:
    """Equal for equal tokenizers; ``none`` where a folder has none that is known."""
    files = [path for name in TOKENIZERS if (path := Path(folder, name)).is_file()]
    digest = blake2b(digest_size=6)
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            while content := file.read(1 << 20):
                digest.update(content)
    return digest.hexdigest() if files else "none"


def model_fingerprint(
    model: str | Path,
    config: Mapping[str, object],
    *,
    dtype: str,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    overrides: Mapping[str, object] = _NONE,
    given: str | None = None,
) -> str:
    """What endpoints take as ``model``: all that must agree beside the layout, in one text.

    ``model`` is the checkpoint's folder, or its name at a hub, of some ``revision``; ``tokenizer``
    where the engine's is, if elsewhere. ``config`` is the configuration that the engine goes by,
    which may differ from the file by what its user has overridden; of ``overrides`` all count but
    those of rotary positions, which are read out of ``config``. ``dtype`` is what the model is
    computed in. ``given`` is the user's own word for the checkpoint, for one that is kept in two
    forms. An engine that keeps keys otherwise than their model's publisher (not turned yet, or in
    another order) must say so there.
    """
    hub = f"@{revision or 'main'}"
    words = tokenizer or model
    others = {name: value for name, value in overrides.items() if name not in ROPE_FIELDS}
    checkpoint = checkpoint_fingerprint(model) if Path(model).is_dir() else named(f"{model}{hub}")
    ids = tokenizer_fingerprint(words) if Path(words).is_dir() else named(f"{words}{hub}")
    return str(
        ModelFingerprint(
            checkpoint=checkpoint if given is None else named(given),
            tokenizer=ids,
            rope=rope_form(config),
            dtype=dtype,
            overrides=shortened(others) if others else "none",
        )
    )


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
