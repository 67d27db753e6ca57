"""A client of what discovery and the router show: one question after the other, no thread."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from kvferry.dashboard.routes import CLUSTER
from kvferry.errors import InputError, KvferryError
from kvferry.telemetry.reports import ClusterView
from kvferry.telemetry.waterfall import Waterfall

T = TypeVar("T")

ASK_S = 15.0
MAX_BYTES = 64 << 20


class StatusUnavailable(KvferryError):
    """What was asked for can't be had; the message says why."""


class UnknownRoom(StatusUnavailable):
    """No endpoint remembers that room."""


class StatusClient:
    """Asks at one address, with a token where there is a key."""

    def __init__(self, url: str, token: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(
                f"{url!r:.200} is no address of a router or discovery; give one like "
                f"http://127.0.0.1:8000"
            )
        self._url = url.rstrip("/")
        self._where = (parts.hostname, parts.port or 80)
        self._token = token

    def cluster(self) -> ClusterView:
        """How it is now."""
        return self._get(CLUSTER, ClusterView)

    def trace(self, room: str) -> Waterfall:
        """The trace of a room. Raises ``UnknownRoom``."""
        return self._get(f"/kvferry/traces/{quote(room, safe='')}", Waterfall)

    def _get(self, path: str, kind: type[T]) -> T:
        status, body = self._ask(path)
        if status != 200:
            message = _message(body) or f"it answered with status {status}"
            raise (UnknownRoom if status == 404 and _message(body) else StatusUnavailable)(message)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StatusUnavailable(f"{self._url} answers something else: {error}") from None

    def _ask(self, path: str) -> tuple[int, bytes]:
        headers: Mapping[str, str] = (
            {"Authorization": f"Bearer {self._token}"} if self._token else {}
        )
        connection = http.client.HTTPConnection(*self._where, timeout=ASK_S)
        try:
            connection.request("GET", path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise StatusUnavailable(
                f"cannot ask {self._url}: {why}; give the router's or the discovery service's --url"
            ) from None
        finally:
            connection.close()


def _message(body: bytes) -> str:
    """What an error says, in the router's form or in the discovery service's."""
    try:
        document = msgspec.json.decode(body)
        return str(document["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return ""
