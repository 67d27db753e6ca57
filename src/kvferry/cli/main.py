"""``kvferry``: the entry point, and what every command shares.

Exit status: 0 done, 1 something was found wrong (a broken promise, wrong bytes, a
problem with this machine) or the output could not be written, 2 bad input (one
sentence on standard error), 3 refused, 130 interrupted. With ``--json`` the last
line on standard output is one JSON document, also when the input was bad.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence

import msgspec

import kvferry
from kvferry.cli import completion, key
from kvferry.cli.bench import command as bench
from kvferry.cli.demo import command as demo
from kvferry.cli.doctor import command as doctor
from kvferry.cli.eval import command as evaluate
from kvferry.cli.parsing import Parser, one_line
from kvferry.cli.plan import command as plan
from kvferry.cli.serve import command as serve
from kvferry.cli.sim import command as sim
from kvferry.cli.top import command as top
from kvferry.cli.trace import command as trace
from kvferry.errors import InputError, KvferryError

DESCRIPTION = "kvferry carries a request's KV cache between workers that shard it differently."
EXIT_NO_OUTPUT = EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def build_parser() -> Parser:
    """All commands and their flags."""
    parser = Parser(prog="kvferry", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"kvferry {kvferry.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    plan.add(commands)
    demo.add(commands)
    bench.add(commands)
    doctor.add(commands)
    evaluate.add(commands)
    key.add(commands)
    serve.add(commands)
    sim.add(commands)
    top.add(commands)
    trace.add(commands)
    completion.add(commands, build_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(words)
        status: int = args.run(args)
    except KvferryError as error:
        sentence = one_line(str(error))
        _complain(sentence)
        if "--json" in words:
            print(msgspec.json.encode({"error": sentence}).decode())
        return EXIT_BAD_INPUT if isinstance(error, InputError) else EXIT_FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    return status


def entry() -> None:
    """The console script."""
    try:
        status = _main_and_flush()
    except BrokenPipeError:
        # The reader has seen enough (``| head``). Nobody is left to tell.
        status = EXIT_NO_OUTPUT
    except OSError as error:
        _complain(f"cannot write to standard output: {error.strerror}; send it elsewhere")
        status = EXIT_NO_OUTPUT
    if status == EXIT_NO_OUTPUT:
        # Keep Python's own flush at exit from failing a second time.
        sys.stdout = None
    sys.exit(status)


def _main_and_flush() -> int:
    if sys.stdout is None:
        _complain("standard output is closed; send it somewhere, such as to a file")
        return EXIT_NO_OUTPUT
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where the terminal lacks a character, show a question mark and not a traceback.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = main()
    except SystemExit as left:
        # argparse leaves this way after --help and --version.
        status = left.code if isinstance(left.code, int) else 0
    sys.stdout.flush()
    return status


def _complain(sentence: str) -> None:
    """One line on standard error, if there is one."""
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            print(f"kvferry: {sentence}", file=sys.stderr)
