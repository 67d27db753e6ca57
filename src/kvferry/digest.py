"""Digest of a request: proves that both engines computed the same tokens with the same model.

Equal room ids only show that two requests were given the same name. The source passes its
digest to ``close``, the target passes its own to ``receive``, and a room whose digests differ
fails before its cache is used. The protocol itself only compares the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from kvferry.errors import InputError

MAX_DIGEST = 64
DIGEST_BYTES = 32
_PURPOSE = b"kvferry-digest-1"
_NONE: Mapping[str, str | bytes] = {}


def digest_of(
    tokens: Sequence[int] | np.ndarray[Any, Any],
    *,
    model: str,
    dtype: str,
    adapters: Sequence[str] = (),
    extra: Mapping[str, str | bytes] = _NONE,
) -> bytes:
    """Return the digest of a prompt's cache. Both sides get equal digests for equal inputs only.

    ``tokens``: all token ids of the prompt, including those whose cache is shared or not sent.
    A NumPy array is the fastest input.
    ``model``: the checkpoint. ``dtype``: the precision of the computation.
    ``adapters``: the adapters in use, in order, such as a LoRA's name and version.
    ``extra``: anything else that changes the cache of equal token ids, such as image hashes, a
    cache salt per tenant, or position scaling. Empty values are ignored.
    """
    ids = token_ids(tokens)
    extra = {name: value for name, value in extra.items() if value}
    digest = blake2b(digest_size=DIGEST_BYTES, person=_PURPOSE)
    for part in (model, dtype, str(len(adapters)), *adapters):
        _add(digest, part)
    for name in sorted(extra):
        _add(digest, name)
        _add(digest, extra[name])
    digest.update(len(extra).to_bytes(8, "little") + len(ids).to_bytes(8, "little"))
    digest.update(ids.data)
    return digest.digest()


def checked_digest(digest: bytes) -> bytes:
    """Return ``digest`` if a frame can carry it. Any hash works if both sides use the same one."""
    if not isinstance(digest, bytes):
        raise InputError(f"a digest is bytes, not {type(digest).__name__}")
    if len(digest) > MAX_DIGEST:
        raise InputError(
            f"a digest has at most {MAX_DIGEST} bytes, not {len(digest)}; "
            f"hash what it stands for, as kvferry.digest_of does"
        )
    return digest


def _add(digest: blake2b, part: str | bytes) -> None:
    """Hash a part with its type and length, so that different lists never hash alike."""
    data = part.encode() if isinstance(part, str) else part
    digest.update((b"s" if isinstance(part, str) else b"b") + len(data).to_bytes(8, "little"))
    digest.update(data)


def token_ids(tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return token ids as little-endian 64-bit integers, the same bytes on every machine."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InputError(
            f"tokens must be a flat list of integer token ids, not {ids.dtype} of shape {ids.shape}"
        )
    return np.ascontiguousarray(ids, dtype="<i8")
