"""The outfit of an owner: threads, tables and sockets that both kinds of endpoint have."""

from __future__ import annotations

import logging
from typing import Generic, NamedTuple, TypeVar

from kvferry.copy.devices import copier_on
from kvferry.ids import Peer
from kvferry.keys import ClusterKey
from kvferry.rendezvous.client import RendezvousClient
from kvferry.runtime.config import EndpointConfig
from kvferry.runtime.copier import Copier, HostCopier
from kvferry.runtime.handles import Handle
from kvferry.runtime.life.prober import Prober
from kvferry.runtime.mover.mover import Mover
from kvferry.runtime.owner.gpu_copies import GpuCopies
from kvferry.runtime.owner.inbox import Inbox
from kvferry.runtime.owner.poller import Poller
from kvferry.runtime.owner.rooms import RoomTable
from kvferry.runtime.setup import EndpointSetup
from kvferry.telemetry.observer import Observer

log = logging.getLogger("kvferry.runtime")

H = TypeVar("H", bound=Handle)


class Outfit(NamedTuple, Generic[H]):
    """Everything that both kinds of endpoint are made of."""

    setup: EndpointSetup
    config: EndpointConfig
    key: ClusterKey | None
    client: RendezvousClient | None
    observer: Observer
    rooms: RoomTable[H]
    inbox: Inbox[object]
    poller: Poller
    mover: Mover
    copier: Copier
    prober: Prober

    @property
    def me(self) -> Peer:
        """Which rank this is."""
        return self.setup.member.peer


def outfit_of(
    setup: EndpointSetup,
    config: EndpointConfig,
    key: ClusterKey | None,
    client: RendezvousClient | None,
    observer: Observer,
) -> Outfit[H]:
    """Make it. The copier and the prober begin at once, and wait."""
    me = setup.member.peer
    held, lacked = setup.transports.names, setup.transports.lacked
    log.info(
        "transports endpoint=%s held=%s lacked=%r",
        *(me, ",".join(held), "; ".join(f"{name}: {why}" for name, why in lacked.items())),
    )
    inbox: Inbox[object] = Inbox()
    mover = Mover(setup.transports, inbox.put, f"kvferry-mover-{me}")
    return Outfit(
        *(setup, config, key, client, observer),
        RoomTable(me, observer),
        inbox,
        Poller(),
        mover,
        _copier(setup, inbox, mover),
        Prober(inbox.put, f"kvferry-prober-{me}"),
    )


def _copier(setup: EndpointSetup, inbox: Inbox[object], mover: Mover) -> Copier:
    device, me = setup.memory.device, setup.member.peer
    if device.is_host:
        return HostCopier(f"kvferry-copier-{me}", inbox.put, mover.write)
    return GpuCopies(copier_on(device))
