"""Signed HTTP requests: each signature is valid once, for one service, from one start to its end.

A signature covers the service's life, the method, the path with its query, the body, the time and
a nonce. It is valid for five minutes before and after its time. A **life** is a random id that a
service takes at each start. Because signatures name it, a recorded request is useless to the
service after a restart, when it has forgotten the nonces it saw, and to other services with the
same key. Requests and responses are not encrypted.

A client asks for the life with ``GET /healthz?nonce=...``, which needs no signature. The response
has a proof, made with the key for that nonce, so nobody without the key can name a life.

Pure except for making nonces and lives; the time is an argument.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple

import msgspec

SCHEME = "kvferry"
TOLERANCE_S = 300
# Only signed requests are remembered, so strangers cannot fill this.
MAX_NONCES = 1 << 20
NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)
HEADER = re.compile(
    rf"{SCHEME} ([0-9a-f]{{32}}):([0-9]{{1,12}}):([0-9a-f]{{32}}):([0-9a-f]{{64}})", re.ASCII
)
_REQUEST, _LIFE = "request", "life"


class SignatureFault(StrEnum):
    """Why a request's signature was refused."""

    UNSIGNED = "unsigned"
    OTHER_KEY = "other-key"
    OTHER_LIFE = "other-life"
    CLOCK = "clock"
    REPLAYED = "replayed"
    FULL = "full"


class SignatureRefused(NamedTuple):
    """Why a request was refused, with a message for its sender."""

    fault: SignatureFault
    message: str


class Introduction(msgspec.Struct, frozen=True):
    """A service's life, with a proof for the client's nonce. Both are empty without a key."""

    life: str = ""
    proof: str = ""

    def fits(self, key: bytes, nonce: str) -> bool:
        """Return whether the proof was made with this key for this nonce."""
        expected = mac(key, _LIFE, nonce, self.life).encode()
        is_life = NONCE.fullmatch(self.life) is not None
        return is_life and hmac.compare_digest(self.proof.encode(), expected)


def new_nonce() -> str:
    """Return 128 random bits in hex."""
    return secrets.token_hex(16)


def sign(key: bytes, life: str, method: str, target: str, body: bytes, now: float) -> str:
    """Return the ``Authorization`` header of one request to a service in that life."""
    time_s, nonce = str(int(now)), new_nonce()
    signature = _signature(key, life, method, target, body, time_s, nonce)
    return f"{SCHEME} {life}:{time_s}:{nonce}:{signature}"


def _signature(
    key: bytes, life: str, method: str, target: str, body: bytes, time_s: str, nonce: str
) -> str:
    digest = hashlib.sha256(body).hexdigest()
    return mac(key, _REQUEST, life, method, target, digest, time_s, nonce)


def mac(key: bytes, *lines: str) -> str:
    """Return the HMAC of some lines. The first line names the purpose, which keeps uses apart."""
    return hmac.new(key, "\n".join(lines).encode(), hashlib.sha256).hexdigest()


class RequestVerifier:
    """Checks signatures for one life of a service, and remembers their nonces until they expire."""

    def __init__(self, key: bytes, max_nonces: int = MAX_NONCES) -> None:
        self.life = new_nonce()
        self._key = key
        self._max_nonces = max_nonces
        self._seen: OrderedDict[str, float] = OrderedDict()

    def introduce(self, nonce: str) -> Introduction:
        """Return this service's life with its proof; empty for a malformed nonce."""
        if not NONCE.fullmatch(nonce):
            return Introduction()
        return Introduction(self.life, mac(self._key, _LIFE, nonce, self.life))

    def check(
        self, header: str, method: str, target: str, body: bytes, now: float
    ) -> SignatureRefused | None:
        """Return why a request is refused; None if its signature is valid and new."""
        parts = HEADER.fullmatch(header)
        if parts is None:
            return SignatureRefused(
                SignatureFault.UNSIGNED, "this needs a cluster key; give it with --key or key="
            )
        life, time_s, nonce, signature = parts.groups()
        expected = _signature(self._key, life, method, target, body, time_s, nonce)
        if not hmac.compare_digest(signature, expected):
            text = "the request was signed with another cluster key; use the same file"
            return SignatureRefused(SignatureFault.OTHER_KEY, text)
        if life != self.life:
            text = "the request was signed for another service or an earlier start; sign it again"
            return SignatureRefused(SignatureFault.OTHER_LIFE, text)
        apart_s = abs(now - int(time_s))
        if apart_s > TOLERANCE_S:
            text = f"the request's clock differs by {apart_s:.0f} s; set both clocks"
            return SignatureRefused(SignatureFault.CLOCK, text)
        return self._remember(nonce, int(time_s) + TOLERANCE_S, now)

    def _remember(self, nonce: str, until: float, now: float) -> SignatureRefused | None:
        if nonce in self._seen:
            return SignatureRefused(
                SignatureFault.REPLAYED, "the request was seen before; sign each one anew"
            )
        # Ordered by arrival, which is nearly the order of expiry; some are dropped a little late.
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        if len(self._seen) >= self._max_nonces:
            text = "too many requests in five minutes; use another service"
            return SignatureRefused(SignatureFault.FULL, text)
        self._seen[nonce] = until
        return None
