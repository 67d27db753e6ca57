"""`make mutants`: finds small bugs in endpoint/, memory/ and protocol/ that no test detects.

make mutants ARGS="--only endpoint/runner"
make mutants ARGS="--sample 100 --seed 7 --jobs 2"
make mutants ARGS="--named"
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mutants.mutate import Mutant, mutants
from mutants.named import named_mutants
from mutants.worker import Unfit, work

ROWS = tuple(f"src/kvferry/{row}" for row in ("endpoint", "memory", "protocol"))
Verdict = tuple[Mutant, str | None]


@dataclass
class Tally:
    """Counts of detected mutants by judge, and the survivors."""

    num_mutants: int
    detected: Counter[str] = field(default_factory=Counter)
    survivors: list[Mutant] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def num_judged(self) -> int:
        """Number of judged mutants."""
        return self.detected.total() + len(self.survivors)

    def add(self, mutant: Mutant, judge: str | None) -> None:
        """Add and print a verdict."""
        if judge is None:
            self.survivors.append(mutant)
            print(f"SURVIVES {mutant}", flush=True)
        else:
            self.detected[judge] += 1
        text = f"{self.num_judged}/{self.num_mutants} judged, {len(self.survivors)} survive"
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)

    def document(self) -> dict[str, Any]:
        """Return the JSON document of the last line."""
        return {
            "mutants": self.num_mutants,
            "judged": self.num_judged,
            "detected": self.detected.total(),
            "by": dict(self.detected),
            "survivors": [f"{each.path}:{each.line} {each.kind}" for each in self.survivors],
            "seconds": round(time.monotonic() - self.began, 1),
        }


def main(words: list[str]) -> int:
    """Judge mutants. Return 1 if one survives."""
    args = _parser().parse_args(words)
    tree = Path.cwd()
    chosen = list(named_mutants(tree)) if args.named else _drawn(tree, args)
    if not chosen:
        print(f"no module of {' or '.join(ROWS)} matches {args.only!r}", file=sys.stderr)
        return 2
    tally = Tally(len(chosen))
    try:
        for mutant, judge in _judged(tree, chosen, args):
            tally.add(mutant, judge)
            if args.named and judge:
                print(f"{mutant.kind}: detected by {judge}", flush=True)
    except Unfit as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    print(file=sys.stderr)
    print(json.dumps(tally.document()))
    return 1 if tally.survivors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only modules whose path contains one of these"
    )
    parser.add_argument("--sample", type=int, help="judge a random sample of this many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="number of workers")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the workers")
    parser.add_argument("--named", action="store_true", help="judge only the named mutants")
    return parser


def _drawn(tree: Path, args: argparse.Namespace) -> list[Mutant]:
    modules = sorted(path for row in ROWS for path in (tree / row).rglob("*.py"))
    names = [str(path.relative_to(tree)) for path in modules]
    chosen = [
        mutant
        for name in names
        if any(only in name for only in args.only)
        for mutant in mutants(name, (tree / name).read_text())
    ]
    if args.sample is None or args.sample >= len(chosen):
        return chosen
    # Shuffled, so that an interrupted run is a smaller sample.
    return random.Random(args.seed).sample(chosen, args.sample)


def _judged(tree: Path, chosen: list[Mutant], args: argparse.Namespace) -> Iterator[Verdict]:
    """Yield verdicts as they arrive."""
    # A worker imports from its own copy, so it must not inherit this process's modules.
    context = multiprocessing.get_context("spawn")
    waiting = chosen[::-1]
    at: dict[Connection, Mutant] = {}
    processes = []
    for _ in range(min(args.jobs, len(chosen))):
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(tree, args.nice, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        at[mine] = waiting.pop()
        mine.send(at[mine])
    try:
        while at:
            for pipe in wait(list(at)):
                assert isinstance(pipe, Connection)
                answer = pipe.recv()
                if isinstance(answer, Unfit):
                    raise answer
                yield at.pop(pipe), answer
                if waiting:
                    at[pipe] = waiting.pop()
                    pipe.send(at[pipe])
    finally:
        for process in processes:
            process.terminate()
            process.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
