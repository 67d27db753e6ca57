"""An endpoint's reports to the rendezvous: its view, as often as it is wished for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.ids import Peer
from kvferry.observe.views import EndpointView, Wishes
from kvferry.rendezvous.calls import Backoff, Calls
from kvferry.rendezvous.records import Fault, RendezvousError

log = logging.getLogger("kvferry.rendezvous")

MakeView = Callable[[Wishes], Future[EndpointView]]

# An owner that is busy for longer is told of by others.
VIEW_S = 5.0
# A rendezvous that knows nothing of views may be replaced by one that does.
UNKNOWN_S = 60.0


@dataclass(eq=False, slots=True)
class Reporting:
    """One endpoint that tells how it is, in the client's event loop."""

    peer: Peer
    incarnation: int
    make: MakeView
    task: asyncio.Task[None] | None = None
    is_known: bool = False

    async def run(self, calls: Calls) -> None:
        """Tell until cancelled."""
        wishes, backoff = Wishes(), Backoff()
        while True:
            pause_s = 0.0
            try:
                async with asyncio.timeout(VIEW_S):
                    view = await asyncio.wrap_future(self.make(wishes))
                wishes = await calls.tell(view)
                self.is_known = True
                backoff.reset()
                if not (wishes.rooms or wishes.layout):
                    pause_s = wishes.every_s
            except RendezvousError as error:
                log.debug("view-not-told peer=%s fault=%s", self.peer, error.fault)
                pause_s = UNKNOWN_S if error.fault is Fault.NOT_FOUND else backoff.next_s()
            except TimeoutError:
                # The owner has much to do, or is gone and so are we soon.
                pause_s = VIEW_S
            await asyncio.sleep(pause_s)
