"""What two engines must have in common before one may use what the other has computed.

A room's id says only that two requests were given the same name. Its digest says that they
are the same request to the same model: a source gives it at ``close``, a target at
``receive``, and a room whose two digests differ fails before anything of it is used.

Pure, and known to no machine: to the protocol a digest is bytes that are equal or not.
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
    """The digest of a prompt's cache. Equal on both sides if, and only if, all of it is.

    ``tokens`` are all of the prompt's ids, also those whose cache is shared or not sent;
    an array of them is quickest. ``model`` tells one checkpoint from another, and ``dtype``
    what it was computed in. ``adapters`` are what was added to it, in their order (a LoRA's
    name and version). ``extra`` is whatever else makes the cache of equal ids differ: the
    hash of each picture behind a placeholder, a cache salt that keeps tenants apart, another
    position scaling. What is left out here is not compared, and what is empty is left out.
    """
    ids = _ids(tokens)
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
    """A digest that fits its frame; any function's will do, if both sides use the same."""
    if not isinstance(digest, bytes):
        raise InputError(f"a digest is bytes, not {type(digest).__name__}")
    if len(digest) > MAX_DIGEST:
        raise InputError(
            f"a digest has at most {MAX_DIGEST} bytes, not {len(digest)}; "
            f"hash what it stands for, as kvferry.digest_of does"
        )
    return digest


def _add(digest: blake2b, part: str | bytes) -> None:
    """With its kind and length in front, so that no two lists of parts read alike."""
    data = part.encode() if isinstance(part, str) else part
    digest.update((b"s" if isinstance(part, str) else b"b") + len(data).to_bytes(8, "little"))
    digest.update(data)


def _ids(tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids as the same bytes on every machine, however they were given."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InputError(
            f"tokens are a list of token ids, not {ids.dtype} of shape {ids.shape}; "
            f"give the prompt's ids as integers"
        )
    return np.ascontiguousarray(ids, dtype="<i8")
