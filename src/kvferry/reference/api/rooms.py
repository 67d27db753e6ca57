"""A room's end, asked of the prefill worker: only the sources know what was written, and how.

The answer is wanted for the end of the caller's answer and asked for at its
beginning, so it costs no time. A prefill worker knows it when all its ranks have
let go of the room, which takes a step of theirs. Not having it costs nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from kvferry import ClusterKey, Room
from kvferry.reference.worker.ends import RoomEnds
from kvferry.reference.worker.jobs import RoomEnd
from kvferry.security.signing import sign
from kvferry.telemetry.logs.context import onward

# How long a prefill worker waits for the end of a room that it is asked about.
ASK_S = 30.0


class RoomAsker:
    """Asks while the application it belongs to is running."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        self._key = key.http if key is not None else None
        self._session: aiohttp.ClientSession | None = None

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """For as long as the application runs."""
        timeout = aiohttp.ClientTimeout(total=ASK_S + 5)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            yield

    async def end(self, url: str, life: str, room: Room) -> RoomEnd | None:
        """How a room ended at a worker in that life, if that can be found out."""
        assert self._session is not None
        path = f"/kvferry/rooms/{quote(str(room), safe='')}"
        where, headers = URL(url + path, encoded=True), onward()
        if self._key is not None and life:
            signed = sign(self._key, life, "GET", path, b"", time.time())
            headers["Authorization"] = signed
        try:
            # A worker knows it or does not; an answer from elsewhere would be somebody's guess.
            async with self._session.get(where, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    return None
                return msgspec.json.decode(await response.read(), type=RoomEnd)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError):
            return None


async def room_end(ends: RoomEnds, room: str, timeout_s: float) -> RoomEnd:
    """How a room ended here; a ``TimeoutError`` if it does not in time."""
    here = asyncio.get_running_loop()
    told: asyncio.Future[RoomEnd] = here.create_future()

    def settle(end: RoomEnd) -> None:
        if not told.done():
            told.set_result(end)

    def tell(end: RoomEnd) -> None:
        # On the engine's thread. The server may be closed by then.
        with contextlib.suppress(RuntimeError):
            here.call_soon_threadsafe(settle, end)

    known = ends.ask(room, tell)
    if known is not None:
        return known
    try:
        async with asyncio.timeout(timeout_s):
            return await told
    finally:
        ends.leave(room, tell)
