"""The digest that engines give: equal for equal requests, and for nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.digest import DIGEST_BYTES, MAX_DIGEST, checked_digest, digest_of
from kvferry.errors import InputError

PLAIN: dict[str, Any] = {"tokens": [1, 2, 3], "model": "m", "dtype": "bf16"}


def digest(**changed: Any) -> bytes:
    its = PLAIN | changed
    return digest_of(its.pop("tokens"), **its)


def test_it_is_public_and_stays_as_it_is() -> None:
    """Two versions of a prefill and a decode worker must agree on it."""
    assert kvferry.digest_of is digest_of
    assert digest().hex() == "1d17bd9c062e3ff6741154bca39aea69b094e5135d546a65eb195482aaac3d9a"
    assert len(digest()) == DIGEST_BYTES <= MAX_DIGEST


@pytest.mark.parametrize(
    "tokens",
    [(1, 2, 3), np.array([1, 2, 3], np.int32), np.array([1, 0, 2, 0, 3], np.uint16)[::2]],
    ids=["tuple", "narrow", "strided"],
)
def test_ids_are_ids_however_they_are_kept(tokens: Any) -> None:
    assert digest(tokens=tokens) == digest()


def test_empty_extras_are_left_out() -> None:
    """Some engines pass an empty salt, others none."""
    assert digest(extra={"salt": "", "pictures": ""}) == digest()


def test_whatever_differs_makes_another() -> None:
    different: list[dict[str, Any]] = [
        {},
        {"tokens": []},
        {"tokens": [1, 2]},
        {"tokens": [1, 2, 3, 0]},
        {"tokens": [2, 1, 3]},
        {"tokens": [1, 2, 3 + (1 << 32)]},
        {"model": "n"},
        {"model": "mb", "dtype": "f16"},
        {"dtype": "f16"},
        {"adapters": ["a"]},
        {"adapters": ["a", "b"]},
        {"adapters": ["b", "a"]},
        {"adapters": ["ab"]},
        {"extra": {"a": "b"}},
        {"extra": {"ab": "c"}},
        {"extra": {"a": b"b"}},
        {"extra": {"image": "1", "salt": "2"}},
        {"extra": {"image": "2", "salt": "1"}},
    ]
    assert len({digest(**one) for one in different}) == len(different)
    assert digest(extra={"a": "1", "b": "2"}) == digest(extra={"b": "2", "a": "1"})


@pytest.mark.parametrize("tokens", [[1.5], ["1"], [[1, 2], [3, 4]], "123", [True], 7], ids=repr)
def test_only_a_flat_list_of_ids_is_accepted(tokens: Any) -> None:
    with pytest.raises(InputError, match="must be a flat list of integer token ids"):
        digest(tokens=tokens)


def test_a_digest_fits_its_frame() -> None:
    assert checked_digest(bytes(MAX_DIGEST)) == bytes(MAX_DIGEST)
    with pytest.raises(InputError, match="hash what it stands for"):
        checked_digest(bytes(MAX_DIGEST + 1))
