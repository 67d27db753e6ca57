"""Arguments: a parser with one-sentence errors, readers of numbers, ``key=value`` lists."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from kvferry.errors import InputError

T = TypeVar("T")

# Eighteen digits fit into 64 bits. Python's int() would also accept other scripts' digits,
# underscores and spaces.
WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
SHOWN = 40
LONGEST_SENTENCE = 400


def show(text: str, most: int = SHOWN) -> str:
    """Return what the user typed, quoted and shortened."""
    return repr(text if len(text) <= most else f"{text[:most]}…")


def show_path(path: object) -> str:
    """Return a path, quoted; it is shortened only if very long."""
    return show(str(path), LONGEST_SENTENCE)


def one_line(text: str) -> str:
    """Return the text on one line, with a dot for each character that is not printable."""
    return "".join(sign if sign.isprintable() else "·" for sign in " ".join(text.split()))


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``InputError`` instead of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise ``InputError`` with the message and a pointer to ``--help``."""
        if len(message) > LONGEST_SENTENCE:
            message = f"{message[:LONGEST_SENTENCE]}…"
        raise InputError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check for unknown words first, so that a typo is not reported as a missing argument."""
        commands = next(
            (a for a in self._actions if isinstance(a, argparse._SubParsersAction)), None
        )
        if commands is None:
            for word in args or ():
                self._check_known(word)
        else:
            self._check_command(commands, iter(args or ()))
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {show(unknown[0])}")
        return parsed, unknown

    def _check_command(self, commands: argparse.Action, words: Iterator[str]) -> None:
        """Check the words up to the command's name; its own parser checks the rest."""
        names = list(commands.choices or ())
        with_value = {f for a in self._actions if a.nargs != 0 for f in a.option_strings}
        for word in words:
            if word.startswith("-"):
                self._check_known(word)
                if word in with_value:
                    next(words, None)
                continue
            if word not in names:
                close = difflib.get_close_matches(word, names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"use {', '.join(names)}"
                raise InputError(f"{self.prog} has no command {show(word)}; {hint}")
            return

    def _check_known(self, word: str) -> None:
        flag = word.partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not flag.startswith("--") or flag in flags:
            return
        close = difflib.get_close_matches(flag, flags, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        raise InputError(f"unknown argument {show(flag)}; {hint}")


def fields(text: str, readers: Mapping[str, Callable[[str], T]], what: str) -> dict[str, T]:
    """Return the values of ``a=1,b=2``, each read by its key's reader.

    Readers raise ``InputError`` for a bad value.
    """
    values: dict[str, T] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if key not in readers:
            if WHOLE.fullmatch(item):
                raise InputError(f"{what} is written as in {next(iter(readers))}={item}")
            close = difflib.get_close_matches(key, readers, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(readers)}"
            raise InputError(f"{what} has no key {show(key)}; {hint}")
        if not equals or not value:
            raise InputError(f"{what}: {key!r} needs a value, as in {key}=4")
        if key in values:
            raise InputError(f"{what} gives {key!r} twice; give it once")
        values[key] = readers[key](value)
    return values


def whole(name: str, least: int = 1) -> Callable[[str], int]:
    """Return a reader of whole numbers of at least ``least``."""

    def read(text: str) -> int:
        if not WHOLE.fullmatch(text):
            is_long = text.isascii() and text.lstrip("+-").isdecimal()
            limit = " of at most 18 digits" if is_long else ""
            raise InputError(f"{name} must be a whole number{limit}, not {show(text)}")
        value = int(text)
        if value < least:
            raise InputError(f"{name} must be at least {least}, not {value}")
        return value

    return read


def number(name: str, least: float, most: float) -> Callable[[str], float]:
    """Return a reader of numbers from ``least`` to ``most``."""

    def read(text: str) -> float:
        value = float(text) if NUMBER.fullmatch(text) else math.nan
        if not least <= value <= most:
            upto = f"{most:,.0f}" if most >= 1 else f"{most:g}"
            raise InputError(f"{name} must be a number from {least:g} to {upto}, not {show(text)}")
        return value

    return read


def given(flag: str, text: str | None) -> str | None:
    """Return the value of an optional flag; an empty value is an error."""
    if text is not None and not text.strip():
        raise InputError(f"{flag} is empty; give it a value or leave it out")
    return text
