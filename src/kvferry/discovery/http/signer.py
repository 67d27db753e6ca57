"""Signs requests to a discovery service, which gets a random id ("life") at each start.

A signature is valid for one life only. Belongs to the client's event loop. Exceptions of aiohttp
pass through to the caller.
"""

from __future__ import annotations

import time

import aiohttp
import msgspec
from yarl import URL

from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.security.keys import ClusterKey
from kvferry.security.signing import Introduction, new_nonce, sign

MAX_BYTES = 1 << 16


class RequestSigner:
    """Signs requests to the service at one URL. Without a key it does nothing."""

    def __init__(self, base: str, key: ClusterKey | None) -> None:
        self.base = base
        self._key = key.http if key is not None else None
        self._life = ""

    def forget(self) -> None:
        """Ask for the service's life again, because it has restarted."""
        self._life = ""

    async def authorization(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes = b""
    ) -> dict[str, str]:
        """Return the headers that authorize a request. Asks for the service's life if unknown."""
        if self._key is None:
            return {}
        if not self._life:
            self._life = await self._request_life(session, self._key)
        return {"Authorization": sign(self._key, self._life, method, path, body, time.time())}

    async def _request_life(self, session: aiohttp.ClientSession, key: bytes) -> str:
        nonce = new_nonce()
        url = URL(f"{self.base}/healthz?nonce={nonce}", encoded=True)
        async with session.get(url, allow_redirects=False) as response:
            answer = await response.content.read(MAX_BYTES)
        try:
            found = msgspec.json.decode(answer, type=Introduction)
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = None
        if found is None or response.status != 200:
            raise DiscoveryError(
                DiscoveryFault.UNREACHABLE,
                f"{self.base} is not a discovery service (it answers {response.status}); "
                f"check the URL",
            )
        if not found.life:
            raise DiscoveryError(
                DiscoveryFault.UNSIGNED,
                f"{self.base} has no cluster key; start it with the same --key",
            )
        if not found.fits(key, nonce):
            raise DiscoveryError(
                DiscoveryFault.UNSIGNED, f"{self.base} has another cluster key; use the same file"
            )
        return found.life
