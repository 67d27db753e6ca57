"""Signed requests: who has the cluster key may speak, once per signature.

A signature covers the method, the path with its query, the body, the time and a
nonce. It is good for five minutes before and after that time, and once. Requests
and answers are not hidden: who can read the wire can read them.

Pure but for the making of nonces; the time is given.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict

from kvferry.rendezvous.records import Fault, RendezvousError

SCHEME = "kvferry"
TOLERANCE_S = 300
# Only signed requests are remembered, so no stranger can fill this.
MAX_NONCES = 1 << 20
HEADER = re.compile(rf"{SCHEME} ([0-9]{{1,12}}):([0-9a-f]{{32}}):([0-9a-f]{{64}})", re.ASCII)


def sign(key: bytes, method: str, target: str, body: bytes, now: float) -> str:
    """The ``Authorization`` header of one request."""
    time_s, nonce = int(now), secrets.token_hex(16)
    return f"{SCHEME} {time_s}:{nonce}:{_signature(key, method, target, body, time_s, nonce)}"


def _signature(key: bytes, method: str, target: str, body: bytes, time_s: int, nonce: str) -> str:
    lines = (method, target, hashlib.sha256(body).hexdigest(), str(time_s), nonce)
    return hmac.new(key, "\n".join(lines).encode(), hashlib.sha256).hexdigest()


class Guard:
    """Checks signatures, and remembers them for as long as they would be good."""

    def __init__(self, key: bytes, max_nonces: int = MAX_NONCES) -> None:
        self._key = key
        self._max_nonces = max_nonces
        self._seen: OrderedDict[str, float] = OrderedDict()

    def check(self, header: str, method: str, target: str, body: bytes, now: float) -> None:
        """Raise ``RendezvousError`` unless this request was signed with our key, just now."""
        parts = HEADER.fullmatch(header)
        if parts is None:
            raise _unsigned("this rendezvous needs a cluster key; give it with --key or key=")
        time_s, nonce = int(parts[1]), parts[2]
        expected = _signature(self._key, method, target, body, time_s, nonce)
        if not hmac.compare_digest(parts[3], expected):
            raise _unsigned("the request was signed with another cluster key; use the same file")
        if abs(now - time_s) > TOLERANCE_S:
            raise _unsigned(
                f"the request's clock differs by {abs(now - time_s):.0f} s; set both clocks"
            )
        self._remember(nonce, time_s + TOLERANCE_S, now)

    def _remember(self, nonce: str, until: float, now: float) -> None:
        if nonce in self._seen:
            raise RendezvousError(Fault.REPLAYED, "the request was seen before; sign each one anew")
        # In order of arrival, which is nearly that of expiry; what is left goes a little later.
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        if len(self._seen) >= self._max_nonces:
            raise RendezvousError(
                Fault.FULL, "too many requests in five minutes; use another rendezvous"
            )
        self._seen[nonce] = until


def _unsigned(message: str) -> RendezvousError:
    return RendezvousError(Fault.UNSIGNED, message)
