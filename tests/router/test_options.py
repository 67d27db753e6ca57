"""Validation of router options."""

from __future__ import annotations

import pytest

from kvferry.errors import InputError
from kvferry.router.options import RouterOptions


@pytest.mark.parametrize(
    "fields",
    [
        {"attempts": 0},
        {"deadline_s": 0},
        {"room_s": float("nan")},
        {"lost_s": 1e9},
        {"decode_urls": ("ftp://h:1",)},
        {"prefill_urls": ("http://h",)},
        {"prefill_urls": ("http://h:99999",)},
    ],
)
def test_bad_options_are_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(InputError):
        RouterOptions(**fields)  # type: ignore[arg-type]
