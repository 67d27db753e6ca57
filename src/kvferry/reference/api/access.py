"""Access to a worker: who may ask it for what.

Without a cluster key a worker listens on loopback only, and takes what comes. With one, a
request that has to do with a room must be signed with it, as the router does: the signature
covers the body, and so the room, the prompt and the deadline, and it is good once, for this
life of this worker. A question without a room needs a signature too, unless it comes over
loopback: it costs time, but can neither hold pages nor bring in anything from elsewhere.
"""

from __future__ import annotations

import ipaddress
import time

from aiohttp import web

from kvferry.http.api_errors import ApiError
from kvferry.security.signing import (
    SCHEME,
    Introduction,
    RequestVerifier,
    SignatureFault,
    SignatureRefused,
)

_REMEDY = "this worker takes only what is signed with the cluster key; ask the router"
UNSIGNED = SignatureRefused(SignatureFault.UNSIGNED, _REMEDY)


class AccessCheck:
    """Belongs to the worker's event loop."""

    def __init__(self, guard: RequestVerifier | None) -> None:
        self._guard = guard

    def introduce(self, nonce: str) -> Introduction:
        """Who this is, for whoever has the key."""
        return self._guard.introduce(nonce) if self._guard is not None else Introduction()

    def demand_tried(self, request: web.Request) -> None:
        """Before a body is read: who does not even try is not let in from elsewhere."""
        if self._guard is not None and not _tries(request) and not is_near(_peer(request)):
            raise refused(UNSIGNED)

    def is_signed(self, request: web.Request, body: bytes) -> bool:
        """Whether this may have to do with a room. A signature that is no good is refused."""
        if self._guard is None:
            return True
        if not _tries(request):
            return False
        header = request.headers["Authorization"]
        complaint = self._guard.check(header, request.method, request.raw_path, body, time.time())
        if complaint is not None:
            raise refused(complaint)
        return True

    def demand_signed(self, request: web.Request, body: bytes = b"") -> None:
        """Let nobody near a room who has no key."""
        if not self.is_signed(request, body):
            raise refused(UNSIGNED)


def refused(complaint: SignatureRefused) -> ApiError:
    """What a caller is told. The router knows these codes."""
    status = 503 if complaint.fault is SignatureFault.FULL else 401
    return ApiError(status, complaint.message, code=f"ticket_{complaint.fault}".replace("-", "_"))


def is_near(peer: object) -> bool:
    """Whether a connection comes from this machine; what can't be told does not."""
    try:
        return ipaddress.ip_address(str(peer)).is_loopback
    except ValueError:
        return False


def _peer(request: web.Request) -> object:
    where = request.transport.get_extra_info("peername") if request.transport else None
    return where[0] if isinstance(where, tuple) and where else None


def _tries(request: web.Request) -> bool:
    """OpenAI's clients send an ``Authorization`` of their own, which says nothing here."""
    return request.headers.get("Authorization", "").startswith(f"{SCHEME} ")
