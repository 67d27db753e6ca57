"""A process of the simulated world: it runs, is stopped, or is dead."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.testing.sim.world import World

Step = Callable[[], None]


class SimProcess:
    """One process. ``catch_up`` gets what came while it was stopped, in its order."""

    def __init__(self, world: World, catch_up: Callable[[list[Step]], None]) -> None:
        self._world = world
        self._catch_up = catch_up
        self.alive = True
        self.has_left = False
        self._stalled_until = 0.0
        self._stopped_s = 0.0
        self._backlog: list[Step] = []

    @property
    def stalled_for(self) -> float:
        """Seconds until the process goes on; 0 if it runs."""
        return max(0.0, self._stalled_until - self._world.now)

    @property
    def ran_s(self) -> float:
        """Seconds that the process has run, without those in which it was stopped."""
        return self._world.now - self._stopped_s + self.stalled_for

    @property
    def serves(self) -> bool:
        """Whether its endpoint is open and answers now."""
        return self.alive and not self.has_left and not self.stalled_for

    def stall(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        until = max(self._stalled_until, self._world.now + seconds)
        self._stopped_s += until - max(self._stalled_until, self._world.now)
        self._stalled_until = until
        self._world.at(seconds, self._resume)

    def wake(self) -> None:
        """SIGCONT now, if it is stopped."""
        self._stopped_s -= self.stalled_for
        self._stalled_until = 0.0
        self._resume()

    def _resume(self) -> None:
        if self.stalled_for > 1e-9 or not self.alive:
            return
        self._stalled_until = 0.0
        backlog, self._backlog = self._backlog, []
        self._catch_up(backlog)

    def put_off(self, then: Step) -> bool:
        """Whether the process is stopped; if so, it does that when it goes on, in order."""
        if self.stalled_for:
            self._backlog.append(then)
        return self.stalled_for > 0
