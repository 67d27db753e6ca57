"""Standard output that is full, closed or narrow, interrupts, and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from running import SHAPE

PLAN = f"plan --prefill tp=2,pp=2 --decode tp=1 {SHAPE}"
WRONG = f"plan --prefill tp=x --decode tp=1 {SHAPE}"


def shell(words: str, redirect: str, **environment: str) -> tuple[int, bytes, bytes]:
    command = f"{sys.executable} -m kvferry {words} {redirect}"
    done = subprocess.run(
        command, shell=True, capture_output=True, check=False, env=os.environ | environment
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [PLAN, f"{PLAN} --json"])
def test_a_full_disk_is_one_sentence(words: str, unbuffered: str) -> None:
    status, _, err = shell(words, ">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert status == 1
    assert err.startswith(b"kvferry: cannot write to standard output: No space left on device")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("words", [PLAN, f"{PLAN} --json", WRONG, "--help"])
def test_closed_standard_output_is_one_sentence(words: str) -> None:
    status, _, err = shell(words, ">&-")
    assert status == 1
    assert err == b"kvferry: standard output is closed; send it somewhere, such as to a file\n"


def test_no_command_prints_the_list_of_commands() -> None:
    status, out, err = shell("", "")
    assert (status, out) == (2, b"")
    assert b"usage: kvferry" in err
    assert b"plan" in err


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_bad_input_without_standard_error_still_has_a_status(redirect: str) -> None:
    status, out, _ = shell(f"{WRONG} --json", redirect)
    assert status == 2
    assert out.startswith(b'{"error":"--prefill tp must be')


@pytest.mark.parametrize("words", [PLAN, "plan --help"])
def test_a_terminal_without_the_characters_gets_question_marks(words: str) -> None:
    status, out, err = shell(words, "", PYTHONIOENCODING="ascii")
    assert (status, err) == (0, b"")
    assert (b"TP2?PP2" in out) == (words == PLAN)


def test_an_interrupt_is_one_line_also_while_the_commands_are_imported() -> None:
    code = (
        "import sys\n"
        "from kvferry.__main__ import entry\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'kvferry.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "entry()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (130, "kvferry: interrupted\n")


# ---------------------------------------------------------------- completion


def completed(*words: str) -> list[str]:
    """Return the completions of the last word, asked for as argcomplete's shell function does."""
    pytest.importorskip("argcomplete")
    line = " ".join(("kvferry", *words))
    request = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE_IFS": "\n",
    }
    code = "import os; os.dup2(1, 8); from kvferry.__main__ import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | request,
    )
    return done.stdout.split("\n")


def test_commands_parts_and_flags_are_completed() -> None:
    assert "trace" in completed("tr")
    assert set(completed("serve", "")) >= {"prefill", "decode", "router", "discovery"}
    assert "--policy" in completed("serve", "router", "--poli")
    assert "--policy" not in completed("serve", "discovery", "--")
    assert "--slow" in completed("trace", "17", "--sl")
