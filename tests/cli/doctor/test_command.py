"""``kvferry doctor`` in real processes with real packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.doctor.packages import Packages
from running import SHAPE

from kvferry.cli.main import main
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.security.keys import KEY_FILE_VARIABLE, ClusterKey

# The first run on a machine compiles the copy loop.
ENOUGH_S = 180
FIELDS = {"area", "name", "state", "detail", "remedy"}
CLEAN = {name: value for name, value in os.environ.items() if name != KEY_FILE_VARIABLE}


def doctor(*words: str, **environment: str) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "doctor", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=ENOUGH_S,
        env=CLEAN | environment,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


class Report:
    """The checked JSON document of a run."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.status, out, err = doctor(*words, "--json", **environment)
        assert err == ""
        document: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert set(document) == {"checks", "ok"}
        self.checks: list[dict[str, str]] = document["checks"]
        for check in self.checks:
            assert set(check) == FIELDS
            assert check["state"] in ("ok", "note", "problem")
            assert (check["remedy"] == "") == (check["state"] == "ok"), check
        assert document["ok"] == all(check["state"] != "problem" for check in self.checks)
        assert self.status == (0 if document["ok"] else 1)

    def of(self, area: str) -> dict[str, dict[str, str]]:
        return {check["name"]: check for check in self.checks if check["area"] == area}

    @property
    def problems(self) -> list[str]:
        return [check["name"] for check in self.checks if check["state"] == "problem"]


WORKING = "class Mine(ShmTransport):\n    pass\n"
LACKING = """
class Mine(ShmTransport):
    @classmethod
    def missing(cls):
        return "the lacking transport needs libpigeon; apt install libpigeon"
"""
CRASHING = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
CHATTY = "print('hello from a library')\n" + WORKING


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    folder = tmp_path / "packages"
    folder.mkdir()
    return Packages(folder)


# ---------------------------------------------------------------- whole runs


def test_a_run_prints_a_table_for_each_area() -> None:
    status, out, err = doctor()
    assert (status, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    areas = ["machine", "transports", "memory", "one-copy writes", "gpus", "rdma", "control"]
    assert [line for line in lines if line in areas] == areas
    assert any(line.startswith("ok ") and " shm " in line for line in lines)
    assert lines[-1] == "No problem prevents the use of auto."


def test_valid_layouts_key_and_discovery_are_ok(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    key = ClusterKey.new()
    key.write(path)
    with DiscoveryServer("127.0.0.1", 0, key) as server:
        report = Report(
            *("--discovery", server.url, "--key", str(path)),
            *f"--prefill tp=4,page=16 --decode tp=1 --tokens 64 {SHAPE}".split(),
        )
    assert report.status == 0
    control = report.of("control")
    assert key.name in control["cluster key"]["detail"]
    assert "answers" in control["discovery"]["detail"]
    assert "takes the key" in control["discovery"]["detail"]
    assert control["clocks"]["state"] == "ok"
    assert "4 moves, proven" in report.of("layouts")["plan"]["detail"]
    assert report.of("layouts")["mode"]["detail"].startswith("slices: about")
    assert "straight into place" in report.of("layouts")["staging"]["detail"]


def test_only_what_was_asked_for_becomes_a_problem(packages: Packages, tmp_path: Path) -> None:
    for name, code in (("lacking", LACKING), ("crashing", CRASHING), ("chatty", CHATTY)):
        packages.add(name, code)
    key = tmp_path / "cluster.key"
    ClusterKey.new().write(key)
    key.chmod(0o644)
    report = Report(
        *("--transport", "lacking", "--key", str(key), "--discovery", "http://127.0.0.1:9"),
        *f"--prefill tp=3 --decode tp=1,dtype=fp8 {SHAPE}".split(),
        PYTHONPATH=packages.path,
    )
    assert report.status == 1
    transports = report.of("transports")
    assert next(iter(transports)) == "lacking"
    assert transports["lacking"] == {
        "area": "transports",
        "name": "lacking",
        "state": "problem",
        "detail": "the lacking transport needs libpigeon",
        "remedy": "apt install libpigeon",
    }
    assert transports["crashing"]["state"] == "note"
    assert "SIGSEGV" in transports["crashing"]["detail"]
    assert transports["chatty"]["detail"].startswith("chatty-ferry 1.5; started in")
    assert transports["shm"]["state"] == "ok"
    assert "chmod 600" in report.of("control")["cluster key"]["remedy"]
    assert report.of("control")["discovery"]["detail"] == "not tried"
    assert report.problems == [
        *("lacking", "cluster key", "tp-does-not-fit-units", "dtype-differs", "dtype-differs")
    ]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--transport pigeon", "there is no transport 'pigeon'; choose one of"),
        ("--discovery nowhere", "is not a discovery URL"),
        ("--discovery=", "--discovery is empty"),
        ("--key=", "--key is empty"),
        ("--prefill tp=2", "--decode is missing; give both sides"),
        ("--decode tp=2", "--prefill is missing; give both sides"),
        ("--prefill tp=2 --decode tp=1", "--layers, --kv-heads, --head-dim missing"),
        (f"--prefill tp=x --decode tp=1 {SHAPE}", "--prefill tp must be a whole number"),
        (f"--prefill tp=1 --decode page=1 --tokens 1000000000 {SHAPE}", "fewer tokens"),
        ("--device tpu", "invalid choice"),
        ("--transprot shm", "did you mean --transport?"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["doctor", *words.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert err.count("\n") == 1
    assert json.loads(out)["error"] in err


def test_a_broken_installation_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None; from kvferry.cli.main import main; "
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "zmq" in done.stderr
    assert "pip install --force-reinstall kvferry" in done.stderr
