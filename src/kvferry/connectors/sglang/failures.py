"""The failure of a room, as SGLang expects to catch it."""

from __future__ import annotations

from kvferry import KvferryError


class RoomFailed(KvferryError):
    """A room failed; the attributes are those that SGLang looks for."""

    def __init__(self, room: int, reason: str, *, is_from_another_rank: bool = False) -> None:
        self.bootstrap_room = room
        self.failure_reason = reason
        self.is_from_another_rank = is_from_another_rank
        super().__init__(f"kvferry: room {room}: {reason}")
