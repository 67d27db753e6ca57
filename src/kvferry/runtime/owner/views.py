"""The view of an endpoint: made on its owner's thread, where nothing changes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvferry.layout.spec import Slot
from kvferry.observe.views import (
    MAX_FAILURES_SHOWN,
    MAX_LINKS,
    MAX_ROOMS_SHOWN,
    MAX_SLOW_SHOWN,
    MAX_STORIES,
    EndpointView,
    FailureView,
    LinkView,
    PathBytes,
    RoomView,
    Wishes,
)
from kvferry.plan.choose import Path
from kvferry.protocol.endpoint import Link
from kvferry.runtime.handles import Handle
from kvferry.runtime.owner.ended import EndedRoom
from kvferry.runtime.owner.loop import Owner
from kvferry.runtime.owner.stories import FailedRoom
from kvferry.runtime.owner.telling import Teller
from kvferry.runtime.setup import EndpointSetup


def endpoint_view(owner: Owner, role: str, wishes: Wishes) -> EndpointView:
    """How an endpoint is. On its owner's thread."""
    now, outfit = time.monotonic(), owner.outfit
    machine, stats, setup = owner.driver.machine, outfit.meter.stats, outfit.setup
    handles: list[Handle] = list(owner.rooms)
    links = list(machine.links.values())
    owner.stories.forget_peers({link.peer for link in links})
    num_ended = sum(stats.rooms.values())
    return EndpointView(
        instance=owner.me.instance,
        rank=owner.me.rank,
        role=role,
        incarnation=setup.incarnation,
        clock=now,
        wall=time.time(),
        transport=",".join(setup.transports.names),
        sharding=str(setup.member.layout),
        num_ranks=setup.member.layout.num_ranks,
        num_open=len(handles),
        num_quarantined=machine.num_quarantined,
        num_done=stats.rooms["done"],
        num_failed=num_ended - stats.rooms["done"],
        staging_used_bytes=stats.staging_used_bytes,
        staging_bytes=setup.staging_bytes,
        pages_held=sum(handle.num_pages for handle in handles),
        pages=num_pages(setup),
        troubles=_troubles(owner),
        links=tuple(_link(owner, link, now) for link in links[:MAX_LINKS]),
        rooms=_open_rooms(handles, now),
        slow=_slow_rooms(owner, now),
        failures=_failures(owner),
        stories=tuple(
            owner.stories.stories(
                Teller(str(owner.me), role), wishes.rooms[:MAX_STORIES], owner.rooms.get
            )
        ),
        layout=setup.member.layout if wishes.layout else None,
    )


def num_pages(setup: EndpointSetup) -> int:
    """How many pages the pools have."""
    groups = {group.name: group for group in setup.member.layout.spec.groups}
    paged = [
        placement.num_pages
        for placement in setup.memory.map.placements
        if not isinstance(groups[placement.group].kind, Slot)
    ]
    return max(paged, default=0)


def _troubles(owner: Owner) -> tuple[str, ...]:
    stats = owner.outfit.meter.stats
    broken = [f"the {thread} thread has ended by a bug; restart it" for thread in stats.broken]
    late = [
        f"the {thread} thread shows no life for {seconds:.0f} s"
        for thread, seconds in stats.stalled.items()
        if seconds
    ]
    return (*broken, *late)


def _link(owner: Owner, link: Link, now: float) -> LinkView:
    sent: dict[Path, int] = owner.stories.sent.get(link.peer, {})
    return LinkView(
        peer=str(link.peer),
        state=str(link.state),
        transport=owner.outfit.meter.stats.links.get(str(link.peer), ""),
        silent_s=max(0.0, now - link.heard_at),
        sent=tuple(
            PathBytes(str(path), num_bytes) for path, num_bytes in sent.items() if num_bytes
        ),
        offset=owner.clocks.offset(link.peer, now),
    )


def _open_rooms(handles: Iterable[Handle], now: float) -> tuple[RoomView, ...]:
    """Those that have been open for longest."""
    rooms = [_open_room(handle, now) for handle in handles]
    return tuple(sorted(rooms, key=lambda room: room.begun)[:MAX_ROOMS_SHOWN])


def _open_room(handle: Handle, now: float) -> RoomView:
    return RoomView(
        room=str(handle.room),
        status=handle.status.name.lower(),
        begun=handle.begun,
        seconds=now - handle.begun,
        request=handle.tag.request,
    )


def _slow_rooms(owner: Owner, now: float) -> tuple[RoomView, ...]:
    slowest: list[EndedRoom] = owner.stories.slow.slowest(now, MAX_SLOW_SHOWN)
    return tuple(
        RoomView(
            room=str(room),
            status="ended",
            begun=at - seconds,
            seconds=seconds,
            request=tag.request,
        )
        for at, seconds, room, tag in slowest
    )


def _failures(owner: Owner) -> tuple[FailureView, ...]:
    failed: list[FailedRoom] = list(owner.stories.failures)[-MAX_FAILURES_SHOWN:]
    return tuple(
        FailureView(
            room=str(one.room),
            at=one.at,
            code=str(one.failure.code),
            reason=one.failure.message[:1000],
            request=one.tag.request,
        )
        for one in failed
    )
