"""How rooms ended: remembered, waited for, and asked of a prefill worker."""

from __future__ import annotations

import asyncio
import threading

import msgspec
from aiohttp import web
from router.fakes import bounded

from kvferry.reference.api.pending import RoomAsker
from kvferry.reference.worker.jobs import MAX_ENDS, RoomEnd, RoomEnds

END = RoomEnd(7, None, "runs", 64)


def test_the_last_rooms_are_remembered_and_old_ones_forgotten() -> None:
    ends = RoomEnds()
    for room in range(MAX_ENDS + 1):
        ends.record(RoomEnd(room))
    assert ends.wait_for(str(MAX_ENDS)).result(0) == RoomEnd(MAX_ENDS)
    assert not ends.wait_for("0").done()


def test_a_room_that_is_used_again_has_a_new_end() -> None:
    ends = RoomEnds()
    first = ends.wait_for("7")
    ends.record(END)
    ends.record(RoomEnd(7, "gone"))
    assert first.result(0) == END
    assert ends.wait_for("7").result(0) == RoomEnd(7, "gone")


@bounded
async def test_many_wait_for_one_room_and_some_leave() -> None:
    """Told by another thread, as the engine's does."""
    ends = RoomEnds()

    async def wait() -> RoomEnd:
        return await asyncio.shield(asyncio.wrap_future(ends.wait_for("7")))

    waiting = [asyncio.create_task(wait()) for _ in range(1000)]
    await asyncio.sleep(0)
    waiting.pop().cancel()
    threading.Thread(target=ends.record, args=(END,)).start()
    assert await asyncio.gather(*waiting) == [END] * 999


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
