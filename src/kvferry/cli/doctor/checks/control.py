"""The control channel, the cluster key, and the discovery service."""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import zmq

from kvferry.cli.doctor.checks.check import Asked, Check, State, lacking, ok
from kvferry.discovery.http.backend import HttpDiscovery
from kvferry.discovery.records import DiscoveryError, DiscoveryFault
from kvferry.endpoint.control.sockets import ControlClient, ControlServer
from kvferry.errors import InputError
from kvferry.plan.units import human_seconds
from kvferry.security.keys import KEY_FILE_VARIABLE, ClusterKey
from kvferry.security.signing import TOLERANCE_S

AREA = "control"
LIMIT_S = 3.0
# Nobody registers under this name, so asking for it disturbs nobody.
STRANGER = "kvferry-doctor"
# Far from what signatures bear, and more than a clock that is kept right ever differs.
ODD_S = 30.0


# ---------------------------------------------------------------- ZeroMQ


def channel(asked: Asked) -> Iterator[Check]:
    """ZeroMQ's version, its encryption, and a frame there and back."""
    versions = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    curve = bool(zmq.has("curve"))
    if curve:
        yield ok(AREA, "zeromq", f"{versions}, with CURVE")
    else:
        yield lacking(
            AREA,
            "zeromq",
            f"{versions}, without CURVE: no cluster key can be used, and so nothing but loopback",
            needed=asked.key_file is not None,
            remedy="pip install --force-reinstall --only-binary :all: pyzmq",
        )
    yield _round_trip(ClusterKey.new() if curve else None)


def _round_trip(key: ClusterKey | None) -> Check:
    server = ControlServer("127.0.0.1", 0, key)
    client = ControlClient(server.address, key)
    begin = time.monotonic()
    try:
        client.send(b"ping")
        while time.monotonic() - begin < LIMIT_S:
            for route, frame in server.receive():
                server.send(route, frame)
            if client.receive():
                taken = human_seconds(time.monotonic() - begin)
                return ok(AREA, "loopback", f"connected, and a frame came back, in {taken}")
            zmq.select([*server.sockets, *client.sockets], [], [], 0.05)
    finally:
        client.close(0)
        server.close(0)
    told = f"a frame over 127.0.0.1 did not come back within {LIMIT_S:g} s"
    remedy = "check that a firewall or sandbox lets this user connect to 127.0.0.1"
    return Check(AREA, "loopback", State.PROBLEM, told, remedy)


# ---------------------------------------------------------------- the key and the discovery service


def cluster(asked: Asked) -> Iterator[Check]:
    """Whether the key can be used and the discovery service reached with it."""
    try:
        key = ClusterKey.read(asked.key_file) if asked.key_file else ClusterKey.from_environment()
    except InputError as error:
        yield lacking(AREA, "cluster key", str(error), needed=True)
        if asked.discovery is not None:
            yield Check(AREA, "discovery", State.NOTE, "not tried", "correct the key first")
        return
    if key is None:
        told = f"none given (--key, {KEY_FILE_VARIABLE}), so endpoints listen on loopback only"
        yield ok(AREA, "cluster key", told)
    else:
        yield ok(AREA, "cluster key", f"{key.name}; every party must have the same")
    if asked.discovery is not None:
        yield from discovery(asked.discovery, key)


def discovery(url: str, key: ClusterKey | None) -> Iterator[Check]:
    """Whether it answers, takes our key, and has our time."""
    begin = time.monotonic()
    try:
        asyncio.run(_ask(url, key))
    except DiscoveryError as error:
        yield _refused(url, error)
        return
    taken = human_seconds(time.monotonic() - begin)
    yield ok(AREA, "discovery", f"{url} answers in {taken}{' and takes the key' if key else ''}")
    apart_s = _clocks_apart_s(url)
    if apart_s is not None:
        yield judge_clocks(apart_s)


async def _ask(url: str, key: ClusterKey | None) -> None:
    """Ask for an instance that nobody has. That there is none is the right answer."""
    discovery = HttpDiscovery(url, key)
    try:
        async with asyncio.timeout(LIMIT_S):
            await discovery.watch(STRANGER, "", 0.0)
    except TimeoutError:
        raise DiscoveryError(
            DiscoveryFault.SLOW, f"{url} does not answer within {LIMIT_S:g} s"
        ) from None
    except DiscoveryError as error:
        if error.fault is not DiscoveryFault.INCOMPLETE:
            raise
    finally:
        await discovery.close()


def _refused(url: str, error: DiscoveryError) -> Check:
    """The remedy, where the error's own sentence has none."""
    own = "; " in str(error) and error.fault is not DiscoveryFault.UNREACHABLE
    remedy = f"start it with `kvferry serve discovery`, or check that {url} is where it listens"
    return lacking(AREA, "discovery", str(error), needed=True, remedy="" if own else remedy)


def _clocks_apart_s(url: str) -> float | None:
    """How far our clock is from the service's, to the second; None if it does not say."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/healthz")
        date = connection.getresponse().getheader("Date")
        told = email.utils.parsedate_to_datetime(date) if date else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return time.time() - told.timestamp() if told else None


def judge_clocks(apart_s: float) -> Check:
    """Signed requests are good for a few minutes only."""
    # The service tells whole seconds, cut off.
    if abs(apart_s) < ODD_S:
        return ok(
            AREA, "clocks", f"{max(0.0, abs(apart_s) - 1):.0f} s from the discovery service's"
        )
    told = f"this clock is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} its own"
    remedy = f"set both clocks: with a key, requests are refused from {TOLERANCE_S} s on"
    return lacking(AREA, "clocks", told, needed=False, remedy=remedy)
