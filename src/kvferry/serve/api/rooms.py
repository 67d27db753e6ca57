"""Asks a prefill worker by which path a room's bytes went: only the sources know.

The answer is wanted for the end of the caller's answer and asked for at its
beginning, so it costs no time. Not having it costs nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from kvferry.ids import Room
from kvferry.serve.jobs import RoomEnd

ASK_S = 1.0


class RoomAsker:
    """Asks while the application it belongs to is running."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """For as long as the application runs."""
        timeout = aiohttp.ClientTimeout(total=2 * ASK_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            yield

    async def path(self, url: str, room: Room) -> str | None:
        """The path that most of the room's bytes took, if that can be found out."""
        assert self._session is not None
        where = URL(f"{url}/kvferry/rooms/{quote(str(room), safe='')}", encoded=True)
        try:
            async with self._session.get(where) as response:
                return msgspec.json.decode(await response.read(), type=RoomEnd).path
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError):
            return None
