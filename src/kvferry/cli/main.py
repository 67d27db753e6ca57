"""``kvferry``: the entry point, and what every command shares.

Exit status: 0 done, 2 bad input (one sentence on standard error), 3 refused,
130 interrupted. With ``--json`` the last line on standard output is one JSON
document, also when the input was bad.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

import kvferry
from kvferry.cli import plan, sim
from kvferry.cli.parsing import Parser
from kvferry.errors import InputError

EXIT_BAD_INPUT = 2
EXIT_CLOSED_PIPE = 1
EXIT_INTERRUPTED = 130


def build_parser() -> Parser:
    """All commands and their flags."""
    parser = Parser(prog="kvferry", description=kvferry.__doc__)
    parser.add_argument("--version", action="version", version=f"kvferry {kvferry.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    plan.add(commands)
    sim.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(words)
        status: int = args.run(args)
    except InputError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        if "--json" in words:
            print(msgspec.json.encode({"error": str(error)}).decode())
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def entry() -> None:
    """The console script."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (``| head``). Nobody is left to tell; keep Python's
        # own flush at exit from complaining.
        sys.stdout = None
        status = EXIT_CLOSED_PIPE
    sys.exit(status)
