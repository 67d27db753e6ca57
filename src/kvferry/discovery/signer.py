"""The signer of requests to one service: knows in which life that is.

Belongs to the event loop of the client. Foreign exceptions are its caller's to translate.
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
    """For one service at one address. Without a key nothing is asked and nothing is signed."""

    def __init__(self, base: str, key: ClusterKey | None) -> None:
        self._base = base
        self._key = key.http if key is not None else None
        self._life = ""

    def forget(self) -> None:
        """It has said that it is not who it was."""
        self._life = ""

    async def authorization(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes = b""
    ) -> dict[str, str]:
        """The headers that let a request in; asks who is there, if that is not known."""
        if self._key is None:
            return {}
        if not self._life:
            self._life = await self._meet(session, self._key)
        return {"Authorization": sign(self._key, self._life, method, path, body, time.time())}

    async def _meet(self, session: aiohttp.ClientSession, key: bytes) -> str:
        nonce = new_nonce()
        where = URL(f"{self._base}/healthz?nonce={nonce}", encoded=True)
        async with session.get(where, allow_redirects=False) as response:
            answer = await response.content.read(MAX_BYTES)
        try:
            told = msgspec.json.decode(answer, type=Introduction)
        except (msgspec.DecodeError, UnicodeDecodeError):
            told = None
        if told is None or response.status != 200:
            raise DiscoveryError(
                DiscoveryFault.UNREACHABLE,
                f"no discovery service answers there (status {response.status}); check the address",
            )
        if not told.life:
            raise DiscoveryError(
                DiscoveryFault.UNSIGNED,
                f"{self._base} has no cluster key; start it with the same --key",
            )
        if not told.fits(key, nonce):
            raise DiscoveryError(
                DiscoveryFault.UNSIGNED, f"{self._base} has another cluster key; use the same file"
            )
        return told.life
