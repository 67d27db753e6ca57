"""Mistakes with a name: each was once made in a line of the driving code, and not noticed.

They are texts, so that they follow the code only if somebody looks after them; a test does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutants.mutate import Mutant, mutant_of

ENDPOINT = "src/kvferry/endpoint"


class Named(NamedTuple):
    """A mistake: what stands in a module, and what stands there instead."""

    name: str
    path: str
    before: str
    after: str


NAMED = (
    Named(
        "a write of unknown fate does not make its session doubtful",
        f"{ENDPOINT}/runner/runner.py",
        "doubtful=fate is WriteFate.UNKNOWN",
        "doubtful=False",
    ),
    Named(
        "a peer's end buries the sessions of its other lives",
        f"{ENDPOINT}/runner/sessions.py",
        "if each.life == (peer, incarnation)]",
        "if each.peer == peer]",
    ),
    Named(
        "a runner that holds memory says that it may leave",
        f"{ENDPOINT}/runner/runner.py",
        "return not self._held",
        "return True",
    ),
    Named(
        "a liveness_port closes though memory is not free",
        f"{ENDPOINT}/loop/loop.py",
        "if free and self.runner.holds_no_memory:",
        "if True:",
    ),
    Named(
        "a runner takes time before what has come",
        f"{ENDPOINT}/runner/runner.py",
        """            for event in arrived:
                self.take(event, now)
            self.advance_time(now)
""",
        """            self.advance_time(now)
            for event in arrived:
                self.take(event, now)
""",
    ),
    Named(
        "an owner takes time before what has come",
        f"{ENDPOINT}/loop/loop.py",
        "        self.runner.turn(self._arrived(ready), now)\n",
        "        self.runner.advance_time(now)\n        self.runner.turn(self._arrived(ready), now)\n",
    ),
    Named(
        "nobody asks after the process of a lost session",
        f"{ENDPOINT}/runner/runner.py",
        "if not record.is_over:",
        "if False:",
    ),
    Named(
        "the owner's port asks nobody",
        f"{ENDPOINT}/loop/probes.py",
        "            self._prober.start_probing(record.peer, record.incarnation, told.address)",
        "            pass",
    ),
    Named(
        "a busy write raises suspicion",
        f"{ENDPOINT}/runner/runner.py",
        "if record is not None and fate is not WriteFate.BUSY:",
        "if record is not None:",
    ),
)


def named_mutants(tree: Path) -> Iterator[Mutant]:
    """Each mistake, made in the code as it is."""
    for each in NAMED:
        source = (tree / each.path).read_text()
        assert source.count(each.before) == 1, f"{each.path} has no longer {each.before!r}"
        mutated = source.replace(each.before, each.after)
        mutant = mutant_of(each.path, source, each.name, mutated)
        assert mutant is not None, each.name
        yield mutant
