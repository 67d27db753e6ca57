"""The effective configuration of ``kvferry serve``, and where each value came from.

A value is a flag's if it would be another without that flag, and a file's if the file names it.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from kvferry.cli.printing import console, print_document
from kvferry.errors import InputError

DEFAULT = "default"
# Of the namespace, but nothing that configures.
NO_SETTINGS = ("run", "json", "config", "part", "print_config")
KEYS = ("key", "key_file")

Build = Callable[[argparse.Namespace], Mapping[str, Any]]


class Setting(NamedTuple):
    """One value, and who said so."""

    key: str
    value: Any
    source: str


def settings(
    args: argparse.Namespace, build: Build, environment: Mapping[str, str] = os.environ
) -> list[Setting]:
    """Everything that would hold, in the order of its keys."""
    values = flattened(build(args))
    config = getattr(args, "config", None)
    named = dict.fromkeys(_in_file(config), str(config)) if config else {}
    sources = named | _flags(args, build, values)
    found = [Setting(key, value, sources.get(key, DEFAULT)) for key, value in values.items()]
    return [_with_environment(setting, environment) for setting in found]


def _with_environment(setting: Setting, environment: Mapping[str, str]) -> Setting:
    from kvferry.security.keys import KEY_FILE_VARIABLE  # noqa: PLC0415 - needs zmq

    file = environment.get(KEY_FILE_VARIABLE)
    if setting.key in KEYS and setting.value is None and file:
        return Setting(setting.key, file, KEY_FILE_VARIABLE)
    return setting


def _flags(args: argparse.Namespace, build: Build, values: Mapping[str, Any]) -> dict[str, str]:
    """What each flag has changed."""
    found: dict[str, str] = {}
    for name, given in vars(args).items():
        if name in NO_SETTINGS or given is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        without = argparse.Namespace(**(vars(args) | {name: None}))
        try:
            others = flattened(build(without))
        except InputError:
            # It can't be left out, so it is where its own value stands.
            others = {key: value for key, value in values.items() if str(value) != str(given)}
        found |= {key: flag for key, value in values.items() if others.get(key, ...) != value}
    return found


def _in_file(path: str) -> list[str]:
    with Path(path).open("rb") as file:
        return list(flattened(tomllib.load(file)))


def flattened(value: object, prefix: str = "") -> dict[str, Any]:
    """Every leaf, as in ``prefill.0.tp``."""
    if isinstance(value, Mapping) and value:
        inside = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        inside = [(str(place), each) for place, each in enumerate(value)]
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, each in inside:
        found |= flattened(each, f"{prefix}.{key}" if prefix else key)
    return found


def print_settings(found: list[Setting], *, as_json: bool) -> None:
    """As a table, or as one document."""
    if as_json:
        document = {one.key: {"value": one.value, "from": one.source} for one in found}
        print_document({"config": document})
        return
    table = Table(box=None)
    for name in ("setting", "value", "from"):
        table.add_column(name)
    for one in found:
        style = "dim" if one.source == DEFAULT else "bold"
        value = "" if one.value is None else str(one.value)
        table.add_row(one.key, escape(value), escape(one.source), style=style)
    console().print(table)
