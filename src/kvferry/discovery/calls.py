"""Single requests to a discovery service: signed, bounded in time, errors as ``DiscoveryError``.

Belongs to the event loop of the client. Foreign exceptions end here.
"""

from __future__ import annotations

import asyncio
import random
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from kvferry.discovery.address import checked_address
from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryErrorDocument,
    DiscoveryFault,
)
from kvferry.discovery.signer import RequestSigner
from kvferry.errors import KvferryError
from kvferry.ids import Peer
from kvferry.security.keys import ClusterKey

T = TypeVar("T")

CALL_S = 5.0
# An instance of thousands of ranks takes a few megabytes.
MAX_ANSWER_BYTES = 64 << 20


# Of its own: threads that wait must not disturb who has seeded the common one.
_JITTER = random.Random()


class Backoff:
    """How long to wait after each error in a row: longer each time, and never alike."""

    FIRST_S, MOST_S = 0.1, 5.0

    def __init__(self) -> None:
        self._errors = 0

    @property
    def is_first(self) -> bool:
        """Whether the last call of ``next_s`` was the first since it went well."""
        return self._errors == 1

    @property
    def has_errors(self) -> bool:
        """Whether it went wrong since it last went well."""
        return self._errors > 0

    def next_s(self) -> float:
        """After one more error."""
        longest = min(self.MOST_S, self.FIRST_S * (1 << min(self._errors, 16)))
        self._errors += 1
        return longest * _JITTER.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It went well."""
        self._errors = 0


class Calls:
    """Signed requests to one service. Belongs to one event loop."""

    def __init__(self, url: str, key: ClusterKey | None) -> None:
        self.url = checked_address(url, "discovery address", "http://10.0.0.1:7077")
        self._signer = RequestSigner(self.url, key)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = CALL_S
    ) -> bytes | None:
        """Return the body of a good answer; None if nothing is new (304)."""
        try:
            return await self._send(method, path, body, timeout_s)
        except DiscoveryError as error:
            if error.fault is not DiscoveryFault.OTHER_LIFE:
                raise
        # It has restarted, and nothing was done. Its new life is asked once.
        self._signer.forget()
        return await self._send(method, path, body, timeout_s)

    async def _send(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes | None:
        if self._session is None:
            # Each instance that is followed holds a connection, so they are not limited here.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            async with asyncio.timeout(CALL_S):
                headers |= await self._signer.authorization(self._session, method, path, body)
            async with self._session.request(
                method,
                URL(self.url + path, encoded=True),
                data=body or None,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                answer = await _read(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise DiscoveryError(
                DiscoveryFault.UNREACHABLE, f"cannot reach the discovery service {self.url}: {why}"
            ) from None
        if response.status == 304:
            return None
        if response.status >= 300:
            raise _refusal(response.status, answer)
        return answer


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in response.content.iter_chunked(1 << 16):
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            raise ValueError("the answer is too large")
        parts.append(part)
    return b"".join(parts)


def _refusal(status: int, answer: bytes) -> DiscoveryError:
    try:
        error = msgspec.json.decode(answer, type=DiscoveryErrorDocument).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return DiscoveryError(
            DiscoveryFault.UNREACHABLE,
            f"no discovery service answers there (status {status}); check the address",
        )
    return DiscoveryError(error.code, error.message)


def decoded(answer: bytes, kind: type[T]) -> T:
    """An answer as a value; raises ``DiscoveryError`` if it can't be used."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KvferryError) as error:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED, f"the discovery service's answer can't be used: {error}"
        ) from None


def path_of(peer: Peer) -> str:
    """Where a rank is, at the service."""
    return f"/v1/instances/{quote(peer.instance, safe='')}/ranks/{peer.rank}"
