"""Sessions table: which writes are in flight in each session, and when provably none is.

A session that was cut is over when all writes that this endpoint started in it have ended with a
known fate, and no peer can write into local memory through it. A write of unknown fate, and a
peer's access to local memory, end only with the peer's process: ``confirm_dead`` takes that
proof, for one incarnation only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.ids import Op, Peer, Session


@dataclass(slots=True, eq=False)
class SessionRecord:
    """State of one session. ``exposed``: the peer can write into local memory."""

    peer: Peer
    incarnation: int
    session: Session
    metadata: bytes
    exposed: bool
    in_flight: set[Op] = field(default_factory=set)
    doubtful: bool = False
    cut: bool = False
    proven: bool = False
    wanted: bool = True

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight in this session, now or later."""
        return self.cut and not (self.in_flight or self.doubtful or self.exposed)

    @property
    def life(self) -> tuple[Peer, int]:
        """The peer and its incarnation."""
        return self.peer, self.incarnation


class Sessions:
    """Every session whose peer has been reached, until the machine has no use for it."""

    def __init__(self, *, exposed: bool) -> None:
        self._exposed = exposed
        self.records: dict[Session, SessionRecord] = {}
        # The session of each write in flight.
        self.by_op: dict[Op, SessionRecord] = {}
        # Sessions that were cut and are still kept. Only these can be over.
        self.ending: dict[Session, SessionRecord] = {}

    def add(self, peer: Peer, incarnation: int, session: Session, metadata: bytes) -> None:
        """Add the session of a peer that was reached."""
        self.records[session] = SessionRecord(peer, incarnation, session, metadata, self._exposed)

    def start(self, op: Op, session: Session) -> bool:
        """Note that a write starts. Return False if the session allows no more writes."""
        record = self.records.get(session)
        if record is None or record.cut:
            return False
        record.in_flight.add(op)
        self.by_op[op] = record
        return True

    def end(self, op: Op, *, doubtful: bool) -> SessionRecord | None:
        """Note that a write has ended, or is in doubt. Return its session, if it was in flight."""
        record = self.by_op.pop(op, None)
        if record is not None:
            record.in_flight.discard(op)
            record.doubtful |= doubtful
        return record

    def cut(self, session: Session) -> SessionRecord | None:
        """Allow no more writes in a session. Return its record, if it is kept."""
        record = self.records.get(session)
        if record is not None:
            record.cut = True
            self.ending[session] = record
        return record

    def confirm_dead(self, peer: Peer, incarnation: int) -> list[SessionRecord]:
        """Cut the sessions of a dead incarnation, and clear their doubt and exposure."""
        found = [each for each in self.records.values() if each.life == (peer, incarnation)]
        for record in found:
            self.cut(record.session)
            record.doubtful = record.exposed = False
        return found

    def abandon(self, session: Session) -> None:
        """Cut a session that the machine has forgotten, and drop it after its last write."""
        record = self.cut(session)
        if record is not None:
            record.wanted = False

    def settle(self) -> tuple[list[SessionRecord], list[SessionRecord]]:
        """Return the sessions that are newly proven over, and those that are now dropped."""
        ending = list(self.ending.values())
        proven = [each for each in ending if each.is_over and not each.proven]
        dropped = [each for each in ending if not (each.wanted or each.in_flight)]
        for record in proven:
            record.proven = True
        for record in dropped:
            del self.records[record.session], self.ending[record.session]
        return proven, dropped

    def needs_proof(self, peer: Peer, incarnation: int) -> bool:
        """Return whether a session waits for proof that this incarnation is dead."""
        ending = self.ending.values()
        return any(each.life == (peer, incarnation) and not each.is_over for each in ending)
