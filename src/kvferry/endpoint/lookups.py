"""Look-ups of prefixes that targets ask for, on a thread where the engine may take its time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import InputError
from kvferry.ids import Peer, Room
from kvferry.prefix import SPAN_TOKENS, chain_tokens
from kvferry.protocol.events import Event, Held, LookUp
from kvferry.transports.mailbox import Mailbox

log = logging.getLogger("kvferry.endpoint")


@dataclass(frozen=True, kw_only=True)
class PrefixQuery:
    """Request of an instance for the longest prefix of a sequence that is held here.

    ``room``: the id under which the held prefix is to be opened at each rank.
    ``peer``: the rank that asks first. ``chain``: the sequence's short chain, to be compared with
    ``PrefixChain.common_tokens``. ``tokens``: how many tokens it covers, the most to answer.
    ``prefix``: the first tokens that the asking instance has; an answer up to this is no use to it.
    ``deadline_s``: seconds from now after which nobody waits; pass it to ``open``.
    """

    room: Room
    peer: Peer
    chain: bytes
    tokens: int
    prefix: int
    deadline_s: float


# Looks up and pins a prefix, and returns its number of tokens.
Holds = Callable[[PrefixQuery], int]


class PrefixLookups:
    """The look-ups of one source. Without ``holds`` it holds nothing, as after a failed look-up.

    ``put`` gives an answer to the loop. The thread begins with the first ``answer_with``.
    """

    def __init__(self, me: Peer, put: Callable[[Event], None]) -> None:
        self._me = me
        self._put = put
        self._holds: Holds | None = None
        self._asked: Mailbox[LookUp | None] = Mailbox()

    def answer_with(self, holds: Holds) -> None:
        """Let ``holds`` answer from now on."""
        begins, self._holds = self._holds is None, holds
        if begins:
            name = f"kvferry-lookup-{self._me}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def look_up(self, action: LookUp) -> None:
        """Queue a look-up. The machine limits their number."""
        if self._holds is None:
            self._put(Held(action.room, 0))
        else:
            self._asked.put(action)

    def close(self) -> None:
        """Let the thread end after the look-up that it makes now. Does not wait for it."""
        self._asked.put(None)

    def _run(self) -> None:
        while (action := self._asked.get()) is not None:
            self._put(Held(action.room, self._tokens_held(action)))

    def _tokens_held(self, action: LookUp) -> int:
        query = PrefixQuery(
            room=action.room,
            peer=action.peer,
            chain=action.chain,
            tokens=chain_tokens(action.chain),
            prefix=action.prefix,
            deadline_s=action.deadline - time.monotonic(),
        )
        if query.deadline_s <= 0 or self._holds is None:
            return 0
        try:
            held = self._holds(query)
            if held % SPAN_TOKENS or not 0 <= held <= query.tokens:
                raise InputError(
                    f"the look-up returned {held} tokens of {query.tokens}; return a multiple of "
                    f"{SPAN_TOKENS} within them"
                )
        except Exception:
            log.exception("lookup-failed endpoint=%s room=%r", self._me, action.room)
            return 0
        return held
