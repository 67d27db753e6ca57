"""The outbox of a machine: what its parts ask for in one step, and the time of that step."""

from __future__ import annotations

from collections import Counter

from kvferry.protocol.events import Action


class Outbox:
    """Actions of the step under way. ``counts`` has what is worth counting over a life."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.actions: list[Action] = []

    def do(self, action: Action) -> None:
        """Ask for something."""
        self.actions.append(action)
