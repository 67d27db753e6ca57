"""One id follows a request from its client to every worker and into every log."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from limited import bounded
from router.fakes import MODEL, loses_the_cache, refuses, site

from kvferry.telemetry.logs.context import checked_trace
from kvferry.telemetry.logs.lines import CountingHandler, LineFormatter, LogSettings

ID = "req-1/a"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """A router's log."""
    stream = io.StringIO()
    handler = CountingHandler(stream)
    handler.setFormatter(LineFormatter(LogSettings("router", "INFO")))
    logger = logging.getLogger("kvferry.router")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("stream", [False, True])
@bounded
async def test_the_clients_id_goes_to_both_workers_and_back(stream: bool) -> None:
    async with site() as here:
        body = {"model": MODEL, "prompt": "p", "stream": stream}
        _, headers, _ = await here.post(body, **{"X-Request-Id": ID})
        assert headers["X-Request-Id"] == ID
        assert here["p0"].request_ids == here["d0"].request_ids == [ID]


@bounded
async def test_a_missing_or_bad_request_id_is_replaced() -> None:
    async with site() as here:
        for given in ({}, {"X-Request-Id": "a b"}):
            _, headers, _ = await here.post({"model": MODEL, "prompt": "p"}, **given)
            assert re.fullmatch("[0-9a-f]{16}", headers["X-Request-Id"])
            assert here["d0"].request_ids[-1] == headers["X-Request-Id"]
        assert len(set(here["d0"].request_ids)) == 2


@bounded
async def test_lines_about_a_request_name_it_and_its_room(log: io.StringIO) -> None:
    async with site(acts={"d0": loses_the_cache}, on_failure="fail") as here:
        body = {"model": MODEL, "prompt": "p"}
        status, _, _ = await here.post(body, **{"X-Request-Id": ID})
        assert status == 503
        room = here["d0"].seen[0]["kvferry"]["room"]
        assert set(here["p0"].request_ids) == {ID}
    lines = [line for line in log.getvalue().splitlines() if ID in line]
    assert [line.split()[4] for line in lines] == ["attempt-failed", "refused"]
    assert all(line.endswith(f" room={room} request={ID}") for line in lines)
    assert all(" WARNING router " in line for line in lines)


@bounded
async def test_a_clients_mistake_is_no_warning(log: io.StringIO) -> None:
    async with site(acts={"p0": refuses(400, None), "d0": refuses(400, None)}) as here:
        assert (await here.ask())[0] == 400
        assert (await here.ask(model="another"))[0] == 404
        assert (await here.post(b"{"))[0] == 400
    assert "refused path=/v1/completions status=404" in log.getvalue()
    assert " WARNING " not in log.getvalue()


def test_a_rank_writes_its_log_as_its_driver_does() -> None:
    """Even the reason for which it never began."""
    code = (
        "import multiprocessing; from kvferry.telemetry.logs.lines import LogSettings; "
        "from kvferry.reference.ranks.processes import rank_main; "
        "ours, theirs = multiprocessing.Pipe(); "
        "settings = LogSettings('decode-0', 'INFO', 0); "
        "rank_main(theirs, None, 3, None, settings)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.match(r"\S+ \S+ ERROR decode-0/3 rank_failed rank=3", result.stderr), result.stderr


@bounded
async def test_the_clients_trace_goes_to_both_workers_and_into_the_log(log: io.StringIO) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with site(acts={"d0": loses_the_cache}, on_failure="fail") as here:
        _, headers, _ = await here.post({"model": MODEL, "prompt": "p"}, traceparent=trace)
        assert set(here["p0"].traces) == set(here["d0"].traces) == {trace}
        assert "traceparent" not in headers
    assert " trace=0af7651916cd43dd8448eb211c80319c" in log.getvalue()


@pytest.mark.parametrize(
    "given", [None, "", "00-0-1-01", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"]
)
def test_an_invalid_trace_is_ignored(given: str | None) -> None:
    assert checked_trace(given) == ""
