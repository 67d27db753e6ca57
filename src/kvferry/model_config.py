"""Reads a model's ``config.json`` safely, and computes the fingerprint of a model.

``kvferry.layout.hf`` and the engines interpret the configuration. All engines use the same
``model_fingerprint``, by which two engines know that they serve the same model.
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

# A model's config.json has a few KiB. A larger file is something else.
MAX_CONFIG_BYTES = 8 << 20
NAME = "config.json"
# Size of each sample of a safetensors file, which begins with names and shapes and ends in weights.
SAMPLE_BYTES = 1 << 16
# All names of files that map tokens to ids.
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"),
)
_NONE: Mapping[str, object] = {}

T = TypeVar("T")


def read_config(where: str | Path) -> dict[str, object]:
    """Return a Hugging Face configuration. ``where`` is the file or its folder."""
    return decode_config(where, dict[str, object])


def decode_config(where: str | Path, kind: type[T]) -> T:
    """Return a Hugging Face configuration decoded as ``kind``."""
    try:
        return msgspec.json.decode(config_bytes(where), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{_shown(where)} can't be used ({error}); give a model's {NAME} or its folder"
        ) from None


def config_bytes(where: str | Path) -> bytes:
    """Return the bytes of a Hugging Face configuration."""
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
    """Return a hash of the configuration and of samples of every weight file.

    It is fast, because it does not read all weights.
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
    """Return a hash of the tokenizer's files, or ``none`` if the folder has no known file."""
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
    """Return the ``model`` of an endpoint: what must agree on both sides besides the layout.

    ``model`` is the checkpoint's folder, or its name on a hub at ``revision``. ``tokenizer`` is the
    folder or name of the tokenizer, if it is elsewhere. ``config`` is the configuration in effect,
    with the user's ``overrides``. All overrides count, except those of rotary positions, which are
    taken from ``config``. ``dtype`` is the type in which the model is computed. ``given`` replaces
    the checkpoint's hash by a name that the user gives, for a checkpoint that exists in two forms.
    An engine that stores keys in another form than the model's publisher (before rotation, or in
    another order) must say so in ``given``.
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
    # Checked before opening, because opening a pipe blocks and a device may be endless.
    if not stat.S_ISREG(path.stat().st_mode):
        raise InputError(f"{_shown(path)} is not a file; give a model's {NAME}")
    with path.open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise InputError(f"{_shown(path)} is too large for a model's {NAME}; check the path")
    return content


def _shown(path: str | Path) -> str:
    return f"{str(path)!r:.400}"
