"""Requests to a discovery service: signed, with timeouts, and errors as ``DiscoveryError``."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from kvferry.discovery.address import checked_address
from kvferry.discovery.http.messages import DiscoveryErrorDocument
from kvferry.discovery.http.signer import RequestSigner
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.errors import KvferryError
from kvferry.security.keys import ClusterKey

T = TypeVar("T")

CALL_S = 5.0
# The view of an instance with thousands of ranks takes a few megabytes.
MAX_ANSWER_BYTES = 64 << 20


class DiscoveryCalls:
    """Requests to one service. Belongs to one event loop."""

    def __init__(self, url: str, key: ClusterKey | None) -> None:
        self.url = checked_address(url, "discovery URL", "http://10.0.0.1:7077")
        self._signer = RequestSigner(self.url, key)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = CALL_S
    ) -> bytes | None:
        """Return the body of a successful response; None for 304. Raises ``DiscoveryError``."""
        try:
            return await self._send(method, path, body, timeout_s)
        except DiscoveryError as error:
            if error.fault is not DiscoveryFault.OTHER_LIFE:
                raise
        # The service has restarted and has done nothing. Sign for its new life and retry once.
        self._signer.forget()
        return await self._send(method, path, body, timeout_s)

    async def _send(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes | None:
        if self._session is None:
            # Each watched instance holds a connection, so their number is not limited here.
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
            reason = str(error) or type(error).__name__
            raise DiscoveryError(
                DiscoveryFault.UNREACHABLE,
                f"cannot reach the discovery service {self.url} ({reason}); "
                f"check the URL, and that it is running",
            ) from None
        if response.status == 304:
            return None
        if response.status >= 300:
            raise _error_in(response.status, answer)
        return answer


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in response.content.iter_chunked(1 << 16):
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            raise ValueError("the response is too large")
        parts.append(part)
    return b"".join(parts)


def _error_in(status: int, answer: bytes) -> DiscoveryError:
    try:
        error = msgspec.json.decode(answer, type=DiscoveryErrorDocument).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return DiscoveryError(
            DiscoveryFault.UNREACHABLE,
            f"what answers is not a discovery service (its status is {status}); check the URL",
        )
    return DiscoveryError(error.code, error.message)


def decoded(answer: bytes, kind: type[T]) -> T:
    """Return a response body as a value. Raises ``DiscoveryError``."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KvferryError) as error:
        raise DiscoveryError(
            DiscoveryFault.MALFORMED,
            f"cannot read the discovery service's response ({error}); run one version of kvferry",
        ) from None
