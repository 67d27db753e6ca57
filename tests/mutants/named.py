"""Named mutants: single-line bugs of the runner and the loop that tests once missed.

Each is a text replacement in a module. A test checks that the text still occurs in the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutants.mutate import Mutant, mutant_of

ENDPOINT = "src/kvferry/endpoint"


class Named(NamedTuple):
    """A bug, as the replacement of a text in a module."""

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
        "a peer's death ends the sessions of its other incarnations",
        f"{ENDPOINT}/runner/sessions.py",
        "if each.life == (peer, incarnation)]",
        "if each.peer == peer]",
    ),
    Named(
        "a runner reports that it holds no memory while it does",
        f"{ENDPOINT}/runner/runner.py",
        "return not self._held",
        "return True",
    ),
    Named(
        "the liveness port closes while memory is not free",
        f"{ENDPOINT}/loop/loop.py",
        "if free and self.runner.holds_no_memory:",
        "if True:",
    ),
    Named(
        "a runner takes time before the events of the turn",
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
        "the loop takes time before the events of the turn",
        f"{ENDPOINT}/loop/loop.py",
        "        self.runner.turn(self._arrived(ready), now)\n",
        "        self.runner.advance_time(now)\n"
        "        self.runner.turn(self._arrived(ready), now)\n",
    ),
    Named(
        "the peer of a cut session is not probed",
        f"{ENDPOINT}/runner/runner.py",
        "if not record.is_over:",
        "if False:",
    ),
    Named(
        "the prober ignores requests to probe",
        f"{ENDPOINT}/liveness/prober.py",
        "                self._probed[record.life] = metadata.liveness_port",
        "                pass",
    ),
    Named(
        "a busy write hints at a death",
        f"{ENDPOINT}/runner/runner.py",
        "if record is not None and fate is not WriteFate.BUSY:",
        "if record is not None:",
    ),
)


def named_mutants(tree: Path) -> Iterator[Mutant]:
    """Yield each bug, applied to the tree's code."""
    for each in NAMED:
        source = (tree / each.path).read_text()
        assert source.count(each.before) == 1, f"{each.path} no longer contains {each.before!r}"
        mutated = source.replace(each.before, each.after)
        mutant = mutant_of(each.path, source, each.name, mutated)
        assert mutant is not None, each.name
        yield mutant
