"""The book of sessions: what is in flight in each, and when that is provably nothing.

A session that was cut is over when every write that we started in it has ended, none of
them is of unknown fate, and, where the peer writes into our memory, the peer is gone.
Doubt and exposure end only with the peer's process: ``confirm_dead`` takes that proof, for one
incarnation and no other.

Pure. Belongs to a runner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.ids import Op, Peer, Session


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One session. ``metadata`` is what the peer says of itself."""

    peer: Peer
    incarnation: int
    session: Session
    metadata: bytes
    exposed: bool
    flying: set[Op] = field(default_factory=set)
    doubtful: bool = False
    cut: bool = False
    proven: bool = False
    wanted: bool = True

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is in flight, or ever will be."""
        return self.cut and not (self.flying or self.doubtful or self.exposed)

    @property
    def life(self) -> tuple[Peer, int]:
        """Whose session it is."""
        return self.peer, self.incarnation


class Sessions:
    """Every session whose peer has been reached, until nobody waits for it."""

    def __init__(self, *, exposed: bool) -> None:
        self._exposed = exposed
        self._records: dict[Session, SessionRecord] = {}
        self._by_op: dict[Op, SessionRecord] = {}
        # Those that were cut and are still kept: few, and only these can be over.
        self.ending: dict[Session, SessionRecord] = {}

    def get(self, session: Session) -> SessionRecord | None:
        """What is known of a session."""
        return self._records.get(session)

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> list[SessionRecord]:
        """Every session that is kept."""
        return list(self._records.values())

    def flying(self, op: Op) -> SessionRecord | None:
        """The session of a write that has begun and not ended."""
        return self._by_op.get(op)

    @property
    def num_flying(self) -> int:
        """Writes that have begun and not ended."""
        return len(self._by_op)

    def add(self, peer: Peer, incarnation: int, session: Session, metadata: bytes) -> None:
        """A peer was reached."""
        self._records[session] = SessionRecord(peer, incarnation, session, metadata, self._exposed)

    def start(self, op: Op, session: Session) -> bool:
        """A write begins, if it still may."""
        record = self._records.get(session)
        if record is None or record.cut:
            return False
        record.flying.add(op)
        self._by_op[op] = record
        return True

    def end(self, op: Op, *, doubtful: bool) -> SessionRecord | None:
        """A write has ended, or nobody knows whether; None if it was not in flight."""
        record = self._by_op.pop(op, None)
        if record is not None:
            record.flying.discard(op)
            record.doubtful |= doubtful
        return record

    def cut(self, session: Session) -> SessionRecord | None:
        """Nothing more of a session may start."""
        record = self._records.get(session)
        if record is not None:
            record.cut = True
            self.ending[session] = record
        return record

    def confirm_dead(self, peer: Peer, incarnation: int) -> list[SessionRecord]:
        """That life of a peer is over: its sessions have nothing left to doubt."""
        found = [each for each in self._records.values() if each.life == (peer, incarnation)]
        for record in found:
            self.cut(record.session)
            record.doubtful = record.exposed = False
        return found

    def unwant(self, session: Session) -> None:
        """Nobody waits for it any more. It is kept until its last write has ended."""
        record = self.cut(session)
        if record is not None:
            record.wanted = False

    def settle(self) -> tuple[list[SessionRecord], list[SessionRecord]]:
        """Sessions that have just been proven over, and those that are dropped with this."""
        ending = list(self.ending.values())
        proven = [each for each in ending if each.is_over and not each.proven]
        dropped = [each for each in ending if not (each.wanted or each.flying)]
        for record in proven:
            record.proven = True
        for record in dropped:
            del self._records[record.session], self.ending[record.session]
        return proven, dropped

    def doubted(self) -> list[SessionRecord]:
        """Sessions in which a write of unknown fate waits for the peer's end."""
        return [record for record in self._records.values() if record.doubtful]

    def awaits(self, peer: Peer, incarnation: int) -> bool:
        """Whether a session waits for proof that this life of a peer is over."""
        ending = self.ending.values()
        return any(each.life == (peer, incarnation) and not each.is_over for each in ending)
