"""Signed HTTP requests: who has the cluster key may speak, once per signature, to one service.

A signature covers the life of the service that it is for, the method, the path with its query,
the body, the time and a nonce. It is good for five minutes before and after that time, once,
and for that life alone: a service takes a random name at each start, so what was overheard is
worth nothing to its next life, which has forgotten what it has seen, nor to another service
with the same key. Requests and answers are not hidden: who can read the wire can read them.

Who wants to ask learns the life first, by ``GET /healthz?nonce=...``, which anybody may ask
for. The answer has a proof, made with the key for that nonce, so nobody else can name a life.

Pure but for the making of nonces and lives; the time is given.
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
# Only signed requests are remembered, so no stranger can fill this.
MAX_NONCES = 1 << 20
NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)
HEADER = re.compile(
    rf"{SCHEME} ([0-9a-f]{{32}}):([0-9]{{1,12}}):([0-9a-f]{{32}}):([0-9a-f]{{64}})", re.ASCII
)
_REQUEST, _LIFE = "request", "life"


class SignatureFault(StrEnum):
    """What is wrong with a request's signature."""

    UNSIGNED = "unsigned"
    OTHER_KEY = "other-key"
    OTHER_LIFE = "other-life"
    CLOCK = "clock"
    REPLAYED = "replayed"
    FULL = "full"


class SignatureRefused(NamedTuple):
    """Why a request is not let in, with a sentence for whoever sent it."""

    doubt: SignatureFault
    message: str


class Introduction(msgspec.Struct, frozen=True):
    """What a service says of itself to a nonce. Without a key it has nothing to say."""

    life: str = ""
    proof: str = ""

    def fits(self, key: bytes, nonce: str) -> bool:
        """Whether somebody with our key has said this, and just now."""
        expected = mac(key, _LIFE, nonce, self.life).encode()
        named = NONCE.fullmatch(self.life) is not None
        return named and hmac.compare_digest(self.proof.encode(), expected)


def new_nonce() -> str:
    """What nobody has used before."""
    return secrets.token_hex(16)


def sign(key: bytes, life: str, method: str, target: str, body: bytes, now: float) -> str:
    """The ``Authorization`` header of one request to a service in that life."""
    time_s, nonce = str(int(now)), new_nonce()
    signature = _signature(key, life, method, target, body, time_s, nonce)
    return f"{SCHEME} {life}:{time_s}:{nonce}:{signature}"


def _signature(
    key: bytes, life: str, method: str, target: str, body: bytes, time_s: str, nonce: str
) -> str:
    digest = hashlib.sha256(body).hexdigest()
    return mac(key, _REQUEST, life, method, target, digest, time_s, nonce)


def mac(key: bytes, *lines: str) -> str:
    """Of some lines. The first says what it is for, so that nothing passes for anything else."""
    return hmac.new(key, "\n".join(lines).encode(), hashlib.sha256).hexdigest()


class RequestVerifier:
    """One life of a service: checks signatures, and remembers them while they would be good."""

    def __init__(self, key: bytes, max_nonces: int = MAX_NONCES) -> None:
        self.life = new_nonce()
        self._key = key
        self._max_nonces = max_nonces
        self._seen: OrderedDict[str, float] = OrderedDict()

    def introduce(self, nonce: str) -> Introduction:
        """For whoever wants to ask something."""
        if not NONCE.fullmatch(nonce):
            return Introduction()
        return Introduction(self.life, mac(self._key, _LIFE, nonce, self.life))

    def check(
        self, header: str, method: str, target: str, body: bytes, now: float
    ) -> SignatureRefused | None:
        """Why this request is not let in; None if it was signed with our key, for us, just now."""
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
            text = "the request is for another service, or an earlier life of this one; ask again"
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
        # In order of arrival, which is nearly that of expiry; what is left goes a little later.
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        if len(self._seen) >= self._max_nonces:
            text = "too many requests in five minutes; use another service"
            return SignatureRefused(SignatureFault.FULL, text)
        self._seen[nonce] = until
        return None
