"""A link that its source has lost while writes go on: the target may not know it yet."""

from __future__ import annotations

from wire import ROOM, let_go, small_world

from kvferry.ids import Peer
from kvferry.layout import Span
from kvferry.plan import Request
from kvferry.protocol.events import Push

S0, T0 = Peer("prefill", 0), Peer("decode0", 0)


def test_an_offer_on_a_lost_link_is_refused_at_once() -> None:
    """If taken, its transfer would outlive the link, and its writes could not be sent."""
    w = small_world()
    w.hold.writes = w.hold.teardowns = True
    w.open(ROOM)
    w.receive(ROOM, Request(16))
    w.run()
    w.tell(S0, Push(ROOM, Span(0, 16)))
    w.run()
    # The target stands still, and its source gives it up with a write under way.
    w.drops = lambda to, _: to == S0
    w.wait(w.config.silence_s + 0.1)
    assert w.source().inflight.writes
    # It goes on, and knows of nothing.
    w.drops = lambda _, __: False
    w.receive("next", Request(16))
    w.open("next")
    w.run()
    assert not w.source().rooms["next"].outbounds
    assert w.outcomes("next") == {"session-replaced"}
    w.hold.writes = w.hold.teardowns = False
    let_go(w)
    w.wait(120)
    w.finish()
