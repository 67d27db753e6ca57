"""Slots ahead: local slots that are filled before it is known where they are written."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.ids import Op, Session
from kvferry.plan.bind import Binding
from kvferry.plan.choose import Path
from kvferry.plan.places import Base
from kvferry.runtime.mover.mover import Posting


@dataclass(slots=True)
class AheadSlot:
    """One gather: where it goes, once that is said, and how large it is, once it has ended."""

    op: Op
    session: Session
    here: Base
    there: Base | None = None
    discarded: bool = False
    num_bytes: int | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is filled, and it is known what becomes of it."""
        return self.num_bytes is not None and (self.discarded or self.there is not None)

    def posting(self) -> Posting | None:
        """What is to be written; None if nothing is."""
        if self.discarded:
            return None
        assert self.there is not None
        assert self.num_bytes is not None
        bulk = Binding.bulk(self.here, self.there, self.num_bytes)
        return Posting(self.op, self.session, bulk, Path.STAGED)
