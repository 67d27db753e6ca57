"""``kvferry``: the entry point and the exit statuses of all commands.

Exit status: 0 success; 1 a failure (a broken promise, wrong bytes, a problem with this machine,
or output that could not be written); 2 bad input (one sentence on standard error); 3 refused;
130 interrupted. With ``--json`` the last line on standard output is one JSON document, even for
bad input.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import msgspec

import kvferry
from kvferry.cli import key
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
EPILOG = """completion of commands and flags in bash and zsh:
  pip install "kvferry[completion]"
  eval "$(register-python-argcomplete kvferry)"
"""
EXIT_NO_OUTPUT = EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="kvferry", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"kvferry {kvferry.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for command in (plan, demo, bench, doctor, evaluate, key, serve, sim, top, trace):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_BAD_INPUT
    try:
        args = parser.parse_args(words)
        status: int = args.run(args)
    except KvferryError as error:
        sentence = one_line(str(error))
        _print_error(sentence)
        if "--json" in words:
            print(msgspec.json.encode({"error": sentence}).decode())
        return EXIT_BAD_INPUT if isinstance(error, InputError) else EXIT_FAILED
    except KeyboardInterrupt:
        _print_error("interrupted")
        return EXIT_INTERRUPTED
    return status


def entry() -> None:
    """Run the console script."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    try:
        status = _main_and_flush()
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe.
        status = EXIT_NO_OUTPUT
    except OSError as error:
        _print_error(f"cannot write to standard output: {error.strerror}; send it elsewhere")
        status = EXIT_NO_OUTPUT
    if status == EXIT_NO_OUTPUT:
        # Keep Python's own flush at exit from failing a second time.
        sys.stdout = None
    sys.exit(status)


def _complete() -> None:
    """Answer the shell's completion request and exit."""
    with contextlib.suppress(ImportError):
        import argcomplete  # noqa: PLC0415 - an optional package

        argcomplete.autocomplete(build_parser())


def _main_and_flush() -> int:
    if sys.stdout is None:
        _print_error("standard output is closed; send it somewhere, such as to a file")
        return EXIT_NO_OUTPUT
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print a question mark for characters that the terminal lacks.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = main()
    except SystemExit as left:
        # argparse exits this way after --help and --version.
        status = left.code if isinstance(left.code, int) else 0
    sys.stdout.flush()
    return status


def _print_error(sentence: str) -> None:
    """Print one line on standard error, if it is open."""
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            print(f"kvferry: {sentence}", file=sys.stderr)
