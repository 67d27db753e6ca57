"""How a room ended: told at once to whoever waits, and to nobody's place elsewhere."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from aiohttp import web
from router.fakes import bounded

from kvferry.reference.api.rooms import RoomAsker, room_end
from kvferry.reference.worker.ends import MAX_ENDS, RoomEnds, TooManyWaiting
from kvferry.reference.worker.jobs import RoomEnd

LONG_S = 600.0
END = RoomEnd(7, None, "runs", 64)


def ignore(end: RoomEnd) -> None:
    raise AssertionError(end)


def test_what_is_known_is_said_and_what_is_old_forgotten() -> None:
    ends = RoomEnds()
    for room in range(MAX_ENDS + 1):
        ends.tell(RoomEnd(room))
    assert ends.ask(str(MAX_ENDS), ignore) == RoomEnd(MAX_ENDS)
    assert ends.ask("0", ignore) is None


def test_those_who_wait_are_told_once_and_bounded() -> None:
    ends, heard = RoomEnds(most_waiting=2), list[RoomEnd]()
    assert ends.ask("7", heard.append) is None
    assert ends.ask("7", ignore) is None
    with pytest.raises(TooManyWaiting, match="ask again later"):
        ends.ask("8", ignore)
    ends.leave("7", ignore)
    ends.leave("7", ignore)
    ends.tell(END)
    ends.tell(END)
    assert heard == [END]
    assert ends.ask("8", ignore) is None
    assert ends.ask("9", ignore) is None


@bounded
async def test_a_thousand_wait_without_a_look_at_the_clock() -> None:
    """Told by another thread, as the engine's does."""
    ends = RoomEnds()
    waiting = [asyncio.create_task(room_end(ends, "7", LONG_S)) for _ in range(1000)]
    await asyncio.sleep(0)
    threading.Thread(target=ends.tell, args=(END,)).start()
    assert await asyncio.gather(*waiting) == [END] * 1000


@bounded
async def test_who_leaves_or_waits_too_long_holds_no_place() -> None:
    ends = RoomEnds(most_waiting=1)
    with pytest.raises(TimeoutError):
        await room_end(ends, "7", 0.001)
    left = asyncio.create_task(room_end(ends, "7", LONG_S))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert ends.ask("7", ignore) is None


@bounded
async def test_a_redirect_is_no_answer() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/kvferry/rooms/7":
            raise web.HTTPFound("/elsewhere")
        return web.Response(body=msgspec.json.encode(END))

    app, asker = web.Application(), RoomAsker()
    app.router.add_get("/{path:.*}", answer)
    app.cleanup_ctx.append(asker.running)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await asker.end(url, "", 7) is None
        assert asked == ["/kvferry/rooms/7"]
        assert await asker.end(url, "", 8) == END
    finally:
        await runner.cleanup()
