"""Signatures: good once, for a while, for exactly what was signed."""

from __future__ import annotations

import pytest

from kvferry.rendezvous.records import Fault, RendezvousError
from kvferry.rendezvous.signing import TOLERANCE_S, Guard, sign

KEY = bytes(range(32))
NOW = 1_800_000_000.5
ASKED = ("PUT", "/v1/x?a=1", b"body")


def test_a_signed_request_passes_once() -> None:
    guard = Guard(KEY)
    header = sign(KEY, *ASKED, NOW)
    guard.check(header, *ASKED, NOW)
    with pytest.raises(RendezvousError, match="seen before") as error:
        guard.check(header, *ASKED, NOW)
    assert error.value.fault is Fault.REPLAYED
    guard.check(sign(KEY, *ASKED, NOW), *ASKED, NOW)


@pytest.mark.parametrize(
    "other",
    [
        ("GET", "/v1/x?a=1", b"body"),
        ("PUT", "/v1/x?a=2", b"body"),
        ("PUT", "/v1/x", b"body"),
        ("PUT", "/v1/x?a=1", b"Body"),
        ("PUT", "/v1/x?a=1", b""),
    ],
)
def test_a_signature_is_for_what_was_signed(other: tuple[str, str, bytes]) -> None:
    with pytest.raises(RendezvousError, match="another cluster key"):
        Guard(KEY).check(sign(KEY, *ASKED, NOW), *other, NOW)


def test_another_key_is_refused() -> None:
    with pytest.raises(RendezvousError, match="another cluster key"):
        Guard(KEY).check(sign(bytes(32), *ASKED, NOW), *ASKED, NOW)


@pytest.mark.parametrize("late_s", [-TOLERANCE_S - 1, TOLERANCE_S + 1])
def test_clocks_may_differ_by_five_minutes(late_s: float) -> None:
    header = sign(KEY, *ASKED, NOW)
    with pytest.raises(RendezvousError, match="set both clocks"):
        Guard(KEY).check(header, *ASKED, NOW + late_s)
    Guard(KEY).check(header, *ASKED, NOW + late_s * 0.99)


def test_the_time_is_signed_as_well() -> None:
    scheme, rest = sign(KEY, *ASKED, NOW).split()
    time_s, nonce, signature = rest.split(":")
    for forged in (f"{int(time_s) + 1}:{nonce}", f"{time_s}:{'0' * 32}"):
        with pytest.raises(RendezvousError, match="another cluster key"):
            Guard(KEY).check(f"{scheme} {forged}:{signature}", *ASKED, NOW)


@pytest.mark.parametrize(
    "header", ["", "Bearer x", "kvferry", "kvferry 1:2:3", "kvferry x:" + "0" * 32 + ":" + "0" * 64]
)
def test_what_is_no_signature_is_refused(header: str) -> None:
    with pytest.raises(RendezvousError, match="needs a cluster key") as error:
        Guard(KEY).check(header, *ASKED, NOW)
    assert error.value.fault is Fault.UNSIGNED


def test_what_is_remembered_is_bounded_and_forgotten_when_it_is_stale() -> None:
    guard = Guard(KEY, max_nonces=3)
    for second in range(3):
        guard.check(sign(KEY, *ASKED, NOW + second), *ASKED, NOW + second)
    with pytest.raises(RendezvousError) as error:
        guard.check(sign(KEY, *ASKED, NOW + 3), *ASKED, NOW + 3)
    assert error.value.fault is Fault.FULL
    later = NOW + TOLERANCE_S + 2
    guard.check(sign(KEY, *ASKED, later), *ASKED, later)


def test_a_signature_is_remembered_for_as_long_as_it_is_good() -> None:
    guard = Guard(KEY)
    early = sign(KEY, *ASKED, NOW + TOLERANCE_S)
    guard.check(early, *ASKED, NOW)
    for later_s in (TOLERANCE_S, 2 * TOLERANCE_S - 1):
        guard.check(sign(KEY, *ASKED, NOW + later_s), *ASKED, NOW + later_s)
        with pytest.raises(RendezvousError, match="seen before"):
            guard.check(early, *ASKED, NOW + later_s)
