"""``kvferry completion``: commands and flags for a shell's tab key."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh", "fish")
EXAMPLE = """example:
  kvferry completion bash > ~/.local/share/bash-completion/completions/kvferry
  kvferry completion zsh > "${fpath[1]}/_kvferry"
  kvferry completion fish > ~/.config/fish/completions/kvferry.fish
"""
BASH = """\
_kvferry() {
  local word=${COMP_WORDS[COMP_CWORD]} path="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ ${COMP_WORDS[i]} == -* ]] || case "$path ${COMP_WORDS[i]}" in
@KNOWN@
    esac
  done
  local words=""
  case "$path" in
@WORDS@
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
}
complete -o filenames -F _kvferry kvferry
"""
# zsh understands bash's scripts.
ZSH = "#compdef kvferry\nautoload -U bashcompinit\nbashcompinit\n"


class Offered(NamedTuple):
    """What may follow some words: commands and flags, each with its help."""

    path: tuple[str, ...]
    commands: dict[str, str]
    flags: dict[str, str]


def add(
    commands: argparse._SubParsersAction[Any], parser: Callable[[], argparse.ArgumentParser]
) -> None:
    """Add the command; ``parser`` makes the whole one."""
    own = commands.add_parser(
        "completion",
        help="print a shell's completion script",
        description="Print a script that completes kvferry's commands and flags in SHELL.",
        epilog=EXAMPLE,
    )
    own.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    own.set_defaults(run=lambda args: run(args, parser()))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print it."""
    print(script(args.shell, parser), end="")
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The whole script."""
    offers = list(offered(parser))
    if shell == "fish":
        return "".join(_fish(offers))
    bash = _bash(offers)
    return (
        bash
        if shell == "bash"
        else f"#compdef kvferry\nautoload -U bashcompinit\nbashcompinit\n{bash}"
    )


def offered(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Offered]:
    """What a parser and those below it take."""
    below: dict[str, Any] = {}
    told: dict[str, str] = {}
    flags = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            told = {one.dest: one.help or "" for one in action._choices_actions}
        for flag in action.option_strings:
            if flag.startswith("--"):
                flags[flag] = action.help or ""
    yield Offered(path, told, flags)
    for name, each in below.items():
        yield from offered(each, (*path, name))


def _bash(offers: list[Offered]) -> str:
    known = [
        f'      "{"".join(f" {w}" for w in one.path)} {name}") path+=" {name}" ;;'
        for one in offers
        for name in one.commands
    ]
    words = [
        f'    "{"".join(f" {w}" for w in one.path)}") '
        f'words="{" ".join((*one.commands, *one.flags))}" ;;'
        for one in offers
    ]
    return BASH.replace("@KNOWN@", "\n".join(known)).replace("@WORDS@", "\n".join(words))


def _fish(offers: list[Offered]) -> Iterator[str]:
    yield "complete -c kvferry -f\n"
    for one in offers:
        names = " ".join(one.commands)
        seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in one.path)
        fresh = f"not __fish_seen_subcommand_from {names}" if names else ""
        when = " and ".join(filter(None, (seen, fresh))) or "true"
        for name, text in one.commands.items():
            yield f"complete -c kvferry -n '{when}' -a {name} -d '{_plain(text)}'\n"
        for flag, text in one.flags.items():
            yield f"complete -c kvferry -n '{seen or 'true'}' -l {flag[2:]} -d '{_plain(text)}'\n"


def _plain(text: str) -> str:
    return text.replace("'", "").replace("\n", " ")[:80]
