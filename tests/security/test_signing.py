"""Signatures: valid once, for a limited time, for one request and one start of one service."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvferry.security.signing import (
    TOLERANCE_S,
    Introduction,
    RequestVerifier,
    SignatureFault,
    new_nonce,
    sign,
)

KEY = bytes(range(32))
NOW = 1_800_000_000.5
ASKED = ("PUT", "/v1/x?a=1", b"body")


def doubt(guard: RequestVerifier, header: str, now: float = NOW) -> SignatureFault | None:
    """Return the fault of a request."""
    refused = guard.check(header, *ASKED, now)
    return refused.fault if refused else None


def signed(guard: RequestVerifier, now: float = NOW) -> str:
    return sign(KEY, guard.life, *ASKED, now)


def test_a_signed_request_is_accepted_once() -> None:
    guard = RequestVerifier(KEY)
    header = signed(guard)
    assert doubt(guard, header) is None
    assert doubt(guard, header) is SignatureFault.REPLAYED
    assert doubt(guard, signed(guard)) is None


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
def test_a_changed_request_is_refused(other: tuple[str, str, bytes]) -> None:
    guard = RequestVerifier(KEY)
    refused = guard.check(signed(guard), *other, NOW)
    assert refused is not None
    assert refused.fault is SignatureFault.OTHER_KEY


def test_another_key_is_refused() -> None:
    guard = RequestVerifier(KEY)
    assert doubt(guard, sign(bytes(32), guard.life, *ASKED, NOW)) is SignatureFault.OTHER_KEY


def test_a_signature_is_valid_for_one_life() -> None:
    """The next life and other services have not seen the nonce."""
    before, after = RequestVerifier(KEY), RequestVerifier(KEY)
    header = signed(before)
    assert doubt(before, header) is None
    assert doubt(after, header) is SignatureFault.OTHER_LIFE
    forged = header.replace(before.life, after.life)
    assert doubt(after, forged) is SignatureFault.OTHER_KEY
    assert doubt(after, signed(after)) is None


@pytest.mark.parametrize("late_s", [-TOLERANCE_S - 1, TOLERANCE_S + 1])
def test_clocks_may_differ_by_five_minutes(late_s: float) -> None:
    guard = RequestVerifier(KEY)
    header = signed(guard)
    assert doubt(guard, header, NOW + late_s) is SignatureFault.CLOCK
    assert doubt(guard, header, NOW + late_s * 0.99) is None


def test_the_time_is_signed() -> None:
    guard = RequestVerifier(KEY)
    scheme, rest = signed(guard).split()
    life, time_s, nonce, signature = rest.split(":")
    for forged in (f"{int(time_s) + 1}:{nonce}", f"{time_s}:{'0' * 32}"):
        assert doubt(guard, f"{scheme} {life}:{forged}:{signature}") is SignatureFault.OTHER_KEY


NO_SIGNATURES = ["", "Bearer x", "kvferry", "kvferry 1:2:3", "kvferry x:" + "0" * 32]


@pytest.mark.parametrize("header", NO_SIGNATURES)
def test_a_malformed_signature_is_refused(header: str) -> None:
    assert doubt(RequestVerifier(KEY), header) is SignatureFault.UNSIGNED


def test_remembered_nonces_are_bounded_and_expire() -> None:
    guard = RequestVerifier(KEY, max_nonces=3)
    for second in range(3):
        assert doubt(guard, signed(guard, NOW + second), NOW + second) is None
    assert doubt(guard, signed(guard, NOW + 3), NOW + 3) is SignatureFault.FULL
    later = NOW + TOLERANCE_S + 2
    assert doubt(guard, signed(guard, later), later) is None


def test_a_nonce_is_remembered_while_its_signature_is_valid() -> None:
    guard = RequestVerifier(KEY)
    early = signed(guard, NOW + TOLERANCE_S)
    assert doubt(guard, early) is None
    for later_s in (TOLERANCE_S, 2 * TOLERANCE_S - 1):
        assert doubt(guard, signed(guard, NOW + later_s), NOW + later_s) is None
        assert doubt(guard, early, NOW + later_s) is SignatureFault.REPLAYED


# ---------------------------------------------------------------- learning a life


def test_only_a_holder_of_the_key_can_name_a_life() -> None:
    guard, nonce = RequestVerifier(KEY), new_nonce()
    told = guard.introduce(nonce)
    assert told.life == guard.life
    assert told.fits(KEY, nonce)
    assert not told.fits(KEY, new_nonce()), "said to somebody else"
    assert not told.fits(bytes(32), nonce)
    assert not replace(told, life=RequestVerifier(KEY).life).fits(KEY, nonce)


@pytest.mark.parametrize("life", ["", "x", "0" * 31 + "\n", "ä" * 32])
def test_a_malformed_life_is_refused(life: str) -> None:
    assert not Introduction(life, "0" * 64).fits(KEY, new_nonce())
    assert not Introduction("0" * 32, "ä").fits(KEY, new_nonce())


@pytest.mark.parametrize("nonce", ["", "x", "0" * 33, "request"])
def test_an_introduction_signs_only_nonces(nonce: str) -> None:
    """The service signs nothing else on request."""
    assert RequestVerifier(KEY).introduce(nonce) == Introduction()
