"""Arguments: a parser whose errors are one sentence, and ``key=value`` lists."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from kvferry.errors import InputError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``InputError`` instead of printing usage and leaving."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look."""
        raise InputError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags first: a typo must not be reported as something missing."""
        if self._subparsers is None:
            for word in args or ():
                self._demand_known(word)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}")
        return parsed, unknown

    def _demand_known(self, word: str) -> None:
        flag = word.partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not flag.startswith("--") or flag in flags:
            return
        close = difflib.get_close_matches(flag, flags, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        raise InputError(f"unknown argument {flag!r}; {hint}")


def fields(text: str, readers: Mapping[str, Callable[[str], T]], what: str) -> dict[str, T]:
    """Read ``a=1,b=2``; each key has a reader that raises ``InputError`` on a bad value."""
    values: dict[str, T] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if key not in readers:
            close = difflib.get_close_matches(key, readers, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(readers)}"
            raise InputError(f"{what} has no key {key!r}; {hint}")
        if not equals or not value:
            raise InputError(f"{what}: {key!r} needs a value, as in {key}=4")
        if key in values:
            raise InputError(f"{what} gives {key!r} twice; give it once")
        values[key] = readers[key](value)
    return values


def whole(name: str, least: int = 1) -> Callable[[str], int]:
    """A reader of whole numbers from ``least`` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise InputError(f"{name} must be a whole number, not {text!r}") from None
        if value < least:
            raise InputError(f"{name} must be at least {least}, not {value}")
        return value

    return read


def positive(name: str) -> Callable[[str], float]:
    """A reader of finite numbers above 0."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{name} must be a number, not {text!r}") from None
        if not 0 < value < float("inf"):
            raise InputError(f"{name} must be above 0 and finite, not {text}")
        return value

    return read
