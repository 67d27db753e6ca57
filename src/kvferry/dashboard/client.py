"""Blocking client of the dashboard's documents."""

from __future__ import annotations

import http.client
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from kvferry.errors import InputError, KvferryError
from kvferry.telemetry.status import ClusterStatus
from kvferry.telemetry.waterfall import Waterfall

T = TypeVar("T")

TIMEOUT_S = 15.0
MAX_BYTES = 64 << 20


class StatusUnavailable(KvferryError):
    """The requested document is not available; the message says why."""


class StatusClient:
    """Requests to a router or a discovery service, with a token if there is one."""

    def __init__(self, url: str, token: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise InputError(
                f"{url!r:.200} is not the URL of a router or a discovery service; "
                f"give one like http://127.0.0.1:8000"
            )
        self._url = url.rstrip("/")
        self._address = (parts.hostname, parts.port or 80)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def cluster(self) -> ClusterStatus:
        """Return the cluster's status now."""
        return self._get("/kvferry/cluster", ClusterStatus)

    def trace(self, room: str) -> Waterfall:
        """Return a room's waterfall, if any endpoint remembers the room."""
        return self._get(f"/kvferry/traces/{quote(room, safe='')}", Waterfall)

    def _get(self, path: str, kind: type[T]) -> T:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            body = response.read(MAX_BYTES)
            if response.status == 200:
                return msgspec.json.decode(body, type=kind)
            message = str(msgspec.json.decode(body)["error"]["message"])
        except (ValueError, KeyError, TypeError) as error:
            raise StatusUnavailable(f"{self._url} sent an unexpected document: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            remedy = "give the --url of a router or a discovery service"
            raise StatusUnavailable(f"cannot reach {self._url}: {reason}; {remedy}") from None
        finally:
            connection.close()
        raise StatusUnavailable(message)
